"""What a configuration needs of memory on the machine that it is to run on, worked out before anything is built."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from megatron_brorl.config.schema import Config
from megatron_brorl.data.tokenizers import Tokenizer
from megatron_brorl.errors import UserError
from megatron_brorl.model_shape import ModelShape
from megatron_brorl.models import memory
from megatron_brorl.models.gpt import DTYPES
from megatron_brorl.rollout.registry import ENGINES
from megatron_brorl.train.setup import context


@dataclass(frozen=True)
class Machines:
    """What a run has."""

    ranks: int
    ranks_per_node: int
    gpu: int  # bytes of a GPU; 0: ranks compute on CPUs
    here: bool = True  # this machine is one of them: its host memory is looked at


def micro_batch_tokens(config: Config, on_gpu: bool) -> int:
    """train.tokens_per_micro_batch, or what stands for its 0."""
    return config.train.tokens_per_micro_batch or (16384 if on_gpu else 2048)


def plan(config: Config, shape: ModelShape, machines: Machines, stage: int = 0) -> memory.Plan:
    """Of a rank of a pipeline stage. Raises UserError where the ranks cannot be cut as [parallel] says."""
    p, t, algo = config.parallel, config.train, config.algo
    # The ranks that share a model must divide them all; ZeRO-1 cuts over those that hold the same part of it.
    of_a_model = p.tensor * p.pipeline
    if machines.ranks % (of_a_model * p.context):
        raise UserError(
            f"parallel.tensor x parallel.pipeline x parallel.context = {of_a_model * p.context} does not divide "
            f"{machines.ranks} ranks"
        )

    # As StageOptions and Megatron's optimizer have it.
    training = memory.Training(
        tensor=p.tensor,
        pipeline=p.pipeline,
        stage=stage,
        shards=machines.ranks // of_a_model if p.distributed_optimizer else 1,
        dtype=DTYPES[config.model.dtype],
        tokens=micro_batch_tokens(config, bool(machines.gpu)),
        recompute=t.recompute == "full",
        offload=t.offload,
        critic=algo.advantage == "gae",
        reference=algo.kl_coef > 0,
    )
    return memory.plan(shape, training, _generation(config, shape))


def _generation(config: Config, shape: ModelShape) -> memory.Generation | None:
    """None of the built-in engine."""
    if config.rollout.engine not in ENGINES:
        return None
    section, kind = config.engine, ENGINES[config.rollout.engine]
    return memory.Generation(
        tensor=section.tensor,
        dtype=DTYPES[config.rollout.dtype],
        fp8_weights=kind.takes_fp8_blocks and section.quantization == "fp8",
        fp8_cache=section.kv_dtype == "fp8",
        fraction=section.memory_fraction,
        context=context(config, shape),
        rows=config.rollout.max_num_seqs,
    )


def preflight(config: Config, shape: ModelShape, machines: Machines) -> tuple[memory.Plan, list[str]]:
    """The plan of the stage that needs most, and its lines to print. Raises UserError where it does not fit."""
    plans = [plan(config, shape, machines, stage) for stage in range(config.parallel.pipeline)]
    found = max(plans, key=lambda x: sum(x.training.values()))

    # None for the built-in engine; one that is not there is told by whoever makes something in it.
    folder = config.engine.shared_memory if found.shared else ""
    look = machines.here and folder and Path(folder).is_dir()
    memory.check_plan(
        found,
        gpu=machines.gpu,
        host=psutil.virtual_memory().total if machines.here else sys.maxsize,
        shared=shutil.disk_usage(folder).total if look else sys.maxsize,
        ranks_per_node=machines.ranks_per_node,
        folder=folder,
    )
    return found, memory.lines(found, machines.gpu, machines.ranks_per_node)


def check_host(plan: memory.Plan, machines: Machines) -> None:
    """Raise UserError where ranks on CPUs need more memory for training than this machine has."""
    need, have = sum(plan.training.values()) * machines.ranks_per_node, psutil.virtual_memory().total
    if not machines.gpu and need > have:
        raise UserError(
            f"training needs about {memory.amount(need)} of memory for {machines.ranks_per_node} ranks here, and there "
            f"are {memory.amount(have)}: lower train.tokens_per_micro_batch, or take a smaller model or a GPU"
        )


def tokenizer_line(tokenizer: Tokenizer, stop_ids: Sequence[int], variables: Mapping[str, Any]) -> str:
    """Describe a tokenizer: its size, the tokens that end a response, and whether it has a chat template.

    variables: of the chat template (data.chat_template_kwargs).
    """
    try:
        tokenizer.apply_chat([{"role": "user", "content": "hello"}], variables)
        chat = "a chat template"
    except UserError:
        chat = "no chat template"
    return f"{tokenizer.vocab_size} tokens, {chat}, responses end at {', '.join(map(str, stop_ids))}"


def gpu_bytes() -> int:
    """Of this machine's smallest GPU; 0 where there is none."""
    if not torch.cuda.is_available():
        return 0
    return min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
