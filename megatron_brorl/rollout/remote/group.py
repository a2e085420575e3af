"""Which ranks of a node share an engine, and their place at it."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_brorl.config.schema import Config
from megatron_brorl.errors import UserError
from megatron_brorl.parallel import device
from megatron_brorl.rollout.remote.engine import TrtLlmEngine
from megatron_brorl.rollout.remote.options import EngineOptions
from megatron_brorl.rollout.remote.process import make_folder


def join(
    config: Config, names: dict[str, tuple[int, ...]], context: int, vocab: int, stop_ids: tuple[int, ...]
) -> TrtLlmEngine:
    """This rank's share of an engine; a collective. Every trtllm.tensor neighbouring ranks of a node share one.

    names: every Hugging Face tensor with its shape. context: prompt + response tokens at most. Raises UserError where
    the ranks of a node cannot be grouped so, or the engine does not come up.
    """
    t, rank = config.trtllm, dist.get_rank()
    local, per_node = (int(os.environ.get(k, d)) for k, d in (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")))
    if per_node % t.tensor:
        raise UserError(
            f"trtllm.tensor = {t.tensor} does not divide the {per_node} ranks of a node (LOCAL_WORLD_SIZE): an engine "
            "spans the GPUs of its ranks"
        )
    if device.on_gpu() and config.rollout.dtype != "bf16":
        raise UserError('rollout.dtype = "fp32": TensorRT-LLM engines compute in bf16; set rollout.dtype = "bf16"')
    leads = local % t.tensor == 0
    mine = str(make_folder(t.shared_memory)) if leads else ""
    folders: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(folders, mine)
    options = EngineOptions(
        model=str(Path(config.model.path).resolve()),
        vocab=vocab,
        context=context,
        dtype={"bf16": "bfloat16", "fp32": "float32"}[config.rollout.dtype],
        max_rows=config.rollout.max_num_seqs,
        stop_ids=stop_ids,
        tensor=t.tensor,
        sampler=t.sampler,
        quantization=t.quantization,
        kv_dtype=t.kv_dtype,
        memory_fraction=t.memory_fraction,
        max_num_tokens=t.max_num_tokens,
        cuda_graphs=t.cuda_graphs,
    )
    return TrtLlmEngine(
        t,
        options,
        names,
        getattr(torch, options.dtype),
        Path(folders[rank - local % t.tensor]),
        range(local, local + t.tensor) if leads else None,
        Path(config.run.dir) / "engines" / f"rank_{rank}.log",
    )
