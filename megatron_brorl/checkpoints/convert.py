"""Convert checkpoints between formats and layouts, one tensor at a time, without building the model.

Hugging Face directory     config.json, *.safetensors, tokenizer
Megatron checkpoint        .metadata, __<rank>_0.distcp, common.pt, metadata.json; here also hf/ (config.json and
                           tokenizer) and manifest.json (SHA-256 of all files)
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from torch import Tensor

from megatron_brorl.checkpoints import adapters, folders, hugging_face, megatron_format, safetensors_files
from megatron_brorl.checkpoints.adapters import MergedCheckpoint
from megatron_brorl.checkpoints.model_state import ModelState
from megatron_brorl.config.schema import ParallelConfig
from megatron_brorl.errors import UserError
from megatron_brorl.families.shape import CONFIG, ModelShape, read_shape, refuse_gguf
from megatron_brorl.models.gpt import Actor, build_actor, check_layout
from megatron_brorl.models.layers.lora import MergedWeights
from megatron_brorl.models.weights import names
from megatron_brorl.models.weights.layouts import WeightEntry
from megatron_brorl.ops.backend import backend
from megatron_brorl.parallel import cpu_bridge, grid
from megatron_brorl.parallel.packing import pack

COMPANIONS = "hf"  # folder of a converted Megatron checkpoint: config.json and tokenizer
TOLERANCE = 1e-4  # maximum difference of logits, relative to the largest logit, or absolute if that logit is below 1
FLAGS = ("--tensor", "--pipeline")  # the options that an error about the layout names
Source = hugging_face.Checkpoint | megatron_format.MegatronCheckpoint | MergedCheckpoint
Check = Callable[[Path], None]  # called with the finished directory
Report = Callable[[int, str], None]  # called with the number of tensors done and the name of the last


def open_hf(directory: Path) -> tuple[Source, ModelShape, Path]:
    """Return a Hugging Face directory, its shape, and the folder of config.json and tokenizer.

    Raises UserError if a file is missing or damaged, or a tensor of config.json's model is missing.
    """
    shape = read_shape(directory, "the source")
    return hugging_face.open_checked(directory, shape), shape, directory


def open_megatron(directory: Path, config: Path | None) -> tuple[Source, ModelShape, Path]:
    """Return a Megatron checkpoint, its shape, and the folder of config.json and tokenizer.

    config: that folder; needed for a checkpoint without hf/, such as a run's. For adapters, it holds the base model.
    Raises UserError if the checkpoint is missing or damaged, or if it does not match the model of config.json.
    """
    for path in filter(None, (directory, config)):
        refuse_gguf(path)
    if not directory.is_dir():
        raise UserError(f"{directory}: no such Megatron checkpoint")
    lora = adapters.saved_lora(directory)
    companions = config or directory / COMPANIONS
    if not config and not companions.is_dir():
        only_adapters = "holds only adapters: give the directory of the base model"
        why = only_adapters if lora else f"has no {COMPANIONS}/{CONFIG}: give a directory that has one"
        raise UserError(f"{directory}: {why} (--config)")
    shape = read_shape(companions, "--config")
    if (directory / folders.MANIFEST).is_file() and (problem := folders.find_damage(directory)):
        raise UserError(f"{directory}: {problem}")
    if lora:
        base = hugging_face.open_checked(companions, shape)
        return MergedCheckpoint(directory, shape, lora, base), shape, companions
    entries = megatron_format.parameter_entries(shape)
    return megatron_format.MegatronCheckpoint(directory, shape, entries), shape, companions


def to_megatron(
    source: Source,
    shape: ModelShape,
    companions: Path,
    target: Path,
    tensor: int,
    pipeline: int,
    report: Report,
    check: Check | None = None,
) -> int:
    """Write a Megatron checkpoint split for tensor x pipeline ranks, and return the bytes of its tensors.

    check is called with the finished directory before it is renamed. Raises UserError if the ranks do not divide the
    model, a tensor cannot be read, or a write fails; then no files are left.
    """
    check_layout(shape, tensor, pipeline, FLAGS)
    entries = megatron_format.parameter_entries(shape, pipeline)
    size = _bytes(source, entries)
    with _output(target) as aside:
        written = megatron_format.write(aside, entries, shape, tensor, source.dtype, source.read)
        for number, entry in enumerate(written):
            report(number + 1, entry.megatron)
        (aside / COMPANIONS).mkdir()
        hugging_face.copy_companions(companions, aside / COMPANIONS)
        folders.write_manifest(aside)
        if check:
            check(aside)
    return size


def to_hf(
    source: Source, shape: ModelShape, companions: Path, target: Path, report: Report, check: Check | None = None
) -> int:
    """Write a Hugging Face directory, and return the bytes of its tensors. check, errors: see to_megatron."""
    entries = megatron_format.parameter_entries(shape)
    size = _bytes(source, entries)
    types = {name: source.dtype(entry) for entry in entries for name in entry.hf}
    layout = {name: (dims, types[name]) for name, dims in names.hf_shapes(shape).items()}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for number, entry in enumerate(entries):
            yield from zip(entry.hf, source.read(entry), strict=True)
            report(number + 1, entry.megatron)

    with _output(target) as aside:
        hugging_face.copy_companions(companions, aside)
        hugging_face.add_generation_files(companions, aside)
        _set_dtype(aside / CONFIG, set(types.values()))
        safetensors_files.write(tensors(), layout, aside)
        if check:
            check(aside)
    return size


def to_peft(source: MergedCheckpoint, base: Path, target: Path, report: Report) -> int:
    """Write the adapters of a checkpoint as a PEFT directory, and return the bytes of its tensors."""
    size = 0

    def tensors() -> Iterator[tuple[str, Tensor]]:
        nonlocal size
        for number, entry in enumerate(source.entries):
            (tensor,) = source.adapters.read(entry)
            size += tensor.nbytes
            yield entry.hf[0], tensor
            report(number + 1, entry.megatron)

    with _output(target) as aside:
        adapters.write_peft(tensors(), source.lora, str(base), aside)
    return size


def verify(
    first: Path, second: Path, shape: ModelShape, target: Path | None = None, merged: MergedCheckpoint | None = None
) -> float:
    """Return the largest difference of float32 logits between two checkpoints of either format.

    The library of each format computes its logits. One model is in memory at a time. Raises UserError if they differ by
    more than TOLERANCE. target: the final name of `second`, for the message. merged: the checkpoint `first`, if it
    holds only adapters. They are merged by the code that a run uses.
    """
    first_logits, second_logits = logits(first, shape, merged), logits(second, shape)
    gap = float((first_logits - second_logits).abs().max())
    limit = TOLERANCE * max(1.0, float(first_logits.abs().max()))
    if not gap <= limit:
        where = target or second
        raise UserError(f"{where}: its logits differ from those of {first} by {gap:.2e}, more than {limit:.2e}")
    return gap


def logits(directory: Path, shape: ModelShape, merged: MergedCheckpoint | None = None) -> Tensor:
    """Return float32 logits [positions, V] for some rows of random tokens, the same for every checkpoint."""
    ids = torch.randint(0, shape.vocab, (4, min(24, shape.context)), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        if (directory / CONFIG).is_file():
            result = _hf_logits(directory, ids)
        else:
            result = _megatron_logits(directory, shape, ids, merged)
    gc.collect()
    return result


def _hf_logits(directory: Path, ids: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return model(ids).logits[:, :-1].flatten(0, 1)  # _megatron_logits has none for the last position of a row


def _megatron_logits(directory: Path, shape: ModelShape, ids: Tensor, merged: MergedCheckpoint | None) -> Tensor:
    """Return the logits of Megatron-Core's loader and model, with this process as the only rank."""
    processes = grid.build(ParallelConfig())
    ops = backend("fused", cpu_bridge.default_device())
    actor = build_actor(shape, processes, torch.float32, ops, lora=merged.lora if merged else None).eval()
    if merged:
        adapter_names = [entry.megatron for entry in merged.entries]
        hugging_face.load(actor, shape, merged.base.directory, adapter_names)
    with cpu_bridge.bridge():
        state = dist_checkpointing.load(ModelState("", actor).sharded(with_optimizer=False), str(directory))
        actor.load_state_dict(state["model"], strict=merged is None)
        if merged:
            _merge(actor, merged.dtype(merged.entries[0]))
        del state
        (batch,) = pack([row[:1] for row in ids], [row[1:] for row in ids], max_tokens=ids.numel())
        hidden = actor.forward_packed(batch).squeeze(1)[batch.predict.to(cpu_bridge.default_device())]
    logits_of = dict(batch.split((hidden @ actor.head_weight().t())[:, : shape.vocab].cpu()))
    grid.leave()
    return torch.cat([logits_of[row] for row in range(len(ids))])


def _merge(actor: Actor, dtype: torch.dtype) -> None:
    """Merge the adapters of a float32 model into its weights, rounded to `dtype` before and after as in a run."""
    parameters = names.global_parameters(actor)
    for parameter in parameters.values():
        parameter.copy_(parameter.to(dtype))
    for name, weight in MergedWeights(actor, parameters).items():
        parameters[name].copy_(weight.to(dtype))
    for name, parameter in parameters.items():
        if name.endswith(".b"):
            parameter.zero_()  # With B = 0, the adapter adds nothing to the merged weight.


def _bytes(source: Source, entries: list[WeightEntry]) -> int:
    """Return the size of all tensors of a checkpoint."""
    return sum(source.dtype(entry).itemsize * sum(map(math.prod, entry.hf_shapes)) for entry in entries)


def _set_dtype(path: Path, types: set[torch.dtype]) -> None:
    """Write the dtype of the weights to config.json, which may state another dtype, for example after a run in fp32."""
    config = json.loads(path.read_text(encoding="utf-8"))
    stated = config.get("dtype") or config.get("torch_dtype")
    dtype_names = {str(t).removeprefix("torch.") for t in types}
    if len(dtype_names) == 1 and stated not in (None, *dtype_names):
        config.pop("torch_dtype", None)
        config["dtype"] = dtype_names.pop()
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _output(target: Path) -> Iterator[Path]:
    """Yield the directory to write (hugging_face.atomic_directory). Raises UserError on disk errors."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with hugging_face.atomic_directory(target) as aside:
            yield aside
    except (OSError, RuntimeError) as e:
        # torch.save raises RuntimeError after a failed write.
        cause = e if isinstance(e, OSError) else e.__context__
        if not isinstance(cause, OSError):
            raise
        full = cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = "; free some space and start again" if full else ""
        reason = os.strerror(cause.errno) if cause.errno else str(cause)
        raise UserError(f"{target}: cannot be written: {reason}{advice}") from None
