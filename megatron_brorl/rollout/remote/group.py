"""Which ranks of a node share an engine, and their place at it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from megatron_brorl.config.schema import Config
from megatron_brorl.errors import UserError
from megatron_brorl.json_files import read_object
from megatron_brorl.parallel import device
from megatron_brorl.rollout.registry import ENGINES
from megatron_brorl.rollout.remote.engine import RemoteEngine
from megatron_brorl.rollout.remote.options import EngineOptions
from megatron_brorl.rollout.remote.process import make_folder
from megatron_brorl.rollout.remote.staging import Node


def join(
    config: Config,
    names: dict[str, tuple[int, ...]],
    context: int,
    vocab: int,
    stop_ids: tuple[int, ...],
    kv_tokens: int = 0,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> RemoteEngine:
    """This rank's share of an engine of the kind rollout.engine; a collective. As many neighbouring ranks of a node
    share one as engine.tensor says.

    names: every Hugging Face tensor with its shape. context: prompt + response tokens at most. kv_tokens: of keys and
    values that there is planned room for; 0 = not known. decode: tokens -> text, for stop strings.
    Raises UserError where the ranks of a node cannot be grouped so, or the engine does not come up.
    """
    engine, settings = config.rollout.engine, config.engine
    kind = ENGINES[engine]

    # Ids are all that an engine is given; for stop strings it must read text as the trainer does.
    model = Path(config.model.path).resolve()
    _check_stop_strings(config.rollout.stop_strings, kind.name, model)

    # What the configuration asks for must fit the node and the engine.
    rank, tensor = dist.get_rank(), settings.tensor
    # What torchrun sets; without it this rank is alone on its node.
    local, per_node = (int(os.environ.get(k, d)) for k, d in (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")))
    if per_node % tensor:
        raise UserError(
            f"engine.tensor = {tensor} does not divide the {per_node} ranks of a node (LOCAL_WORLD_SIZE): an engine "
            "spans the GPUs of its ranks"
        )

    # An engine's GPU kernels know few dtypes; without a GPU, in tests, any will do.
    if device.on_gpu() and config.rollout.dtype not in kind.dtypes:
        raise UserError(
            f'rollout.dtype = "{config.rollout.dtype}": {kind.name} engines compute in {", ".join(kind.dtypes)}; set '
            f'rollout.dtype = "{kind.dtypes[0]}"'
        )

    # The first of the ranks that share an engine makes its folder, and all ranks hear of all folders.
    leads = local % tensor == 0
    mine = str(make_folder(settings.shared_memory, "engine.shared_memory")) if leads else ""
    folders: list[str] = [""] * dist.get_world_size()  # by rank; "" of those that do not lead
    dist.all_gather_object(folders, mine)  # a collective: what fails on all ranks alike was checked above
    exchange = _exchange(rank - local, per_node, config.parallel.timeout_s)
    engine_exchange = _exchange(rank - local % tensor, tensor, config.parallel.timeout_s)

    options = EngineOptions(
        engine=engine,
        model=str(model),
        vocab=vocab,
        context=context,
        dtype={"bf16": "bfloat16", "fp32": "float32"}[config.rollout.dtype],  # torch's names
        max_rows=config.rollout.max_num_seqs,  # in flight at a time
        stop_ids=stop_ids,
        stop_strings=config.rollout.stop_strings,
        threads=torch.get_num_threads() * tensor,
        kv_bytes=(config.rollout.kv_cache_mib * 2**20 or psutil.virtual_memory().available // 2 // per_node) * tensor,
        max_kv_tokens=kv_tokens,
        section=dataclasses.asdict(settings),
    )

    # The engine has the GPUs of the ranks that share it.
    return RemoteEngine(
        settings,
        options,
        names,
        Path(folders[rank - local % tensor]),  # that of the rank that leads
        range(local, local + tensor) if leads else None,  # numbered within the node
        Path(config.run.dir) / "engines" / f"rank_{rank}.log",
        Node(local, per_node, Path(folders[rank - local]), exchange),
        # Rollouts end at stop strings by the trainer's tokenizer, as those of the built-in engine do.
        decode,
        lambda: engine_exchange(None),  # returns when every rank of the engine has called it
    )


def _check_stop_strings(strings: Sequence[str], engine: str, model: Path) -> None:
    """Raise UserError where the engine would end responses at other places than the built-in one."""
    path = model / "tokenizer.json"
    if strings and not path.is_file():
        raise UserError(
            f"rollout.stop_strings: {engine} finds them with the model's tokenizer.json, and {model} has none: stop "
            'at tokens only, or set rollout.engine = "torch"'
        )

    # The engine decodes a response after its prompt. Many decoders drop the space at the start of a text, so that only
    # the engine would see a string with that space at the start of a response.
    spaced = [s for s in strings if s.startswith(" ")]
    if spaced and (read_object(path).get("decoder") or {}).get("type") != "ByteLevel":
        raise UserError(
            f"rollout.stop_strings: {spaced[0]!r} begins with a space, and {path} drops the space at the start of a "
            f'response, which {engine} does not: leave the space out, or set rollout.engine = "torch"'
        )


def _exchange(first: int, size: int, timeout_s: float) -> Callable[[Any], list[Any]]:
    """A collective of the ranks first .. first + size - 1, over gloo: what each gives, in order."""
    # Nodes may have different numbers of ranks, and every rank takes part in making every group.
    spans: list[tuple[int, int]] = [(0, 0)] * dist.get_world_size()
    dist.all_gather_object(spans, (first, size))
    group = None
    for start, count in sorted(span for span in set(spans) if span[1] > 1):
        ranks = list(range(start, start + count))
        made = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), backend="gloo")
        group = made if start == first else group

    def exchange(own: Any) -> list[Any]:
        found: list[Any] = [None] * size
        dist.all_gather_object(found, own, group=group)
        return found

    return exchange if size > 1 else lambda own: [own]
