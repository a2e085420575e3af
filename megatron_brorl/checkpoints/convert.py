"""Checkpoints from one format and layout to another, one tensor at a time, without building the model.

Hugging Face directory     config.json, *.safetensors, tokenizer
Megatron checkpoint        .metadata, __<rank>_0.distcp, common.pt, metadata.json; here also hf/ (config.json and
                           tokenizer) and manifest.json (SHA-256 of all files)
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megatron_brorl.checkpoints import hugging_face, manifest, megatron_format, safetensors_files
from megatron_brorl.errors import UserError
from megatron_brorl.model_shape import CONFIG, ModelShape, read_shape, refuse_gguf
from megatron_brorl.models import hf_names
from megatron_brorl.models.gpt import check_layout
from megatron_brorl.reshard.layout import Entry

COMPANIONS = "hf"  # folder of a converted Megatron checkpoint: config.json and tokenizer
FLAGS = ("--tensor", "--pipeline")
Check = Callable[[Path], None]
Report = Callable[[int, int, str], None]  # (entries done, entries in all, name of the last)


class Source(Protocol):
    """A checkpoint that can be read tensor by tensor; directory and config.json's model."""

    directory: Path

    def dtype(self, entry: Entry) -> torch.dtype:
        """The type of an entry's tensors."""
        ...

    def read(self, entry: Entry) -> list[Tensor]:
        """The full Hugging Face tensors of an entry, of the shapes that it lists."""
        ...


def open_hf(directory: Path) -> tuple[Source, ModelShape, Path]:
    """A Hugging Face directory: its tensors, its shape and where config.json and tokenizer stand.

    Raises UserError where a file is missing or is none, or a tensor of config.json's model is.
    """
    shape = read_shape(directory)
    source = hugging_face.Checkpoint(directory)
    source.check(hf_names.hf_shapes(shape))
    source.check_tied(shape)
    return source, shape, directory


def open_megatron(directory: Path, config: Path | None) -> tuple[Source, ModelShape, Path]:
    """A Megatron checkpoint, checked against its manifest where it has one.

    config: a Hugging Face directory with config.json and tokenizer, for checkpoints without them (those of a run).
    Raises UserError where there is none, where it is damaged, or not of config.json's model.
    """
    for given in filter(None, (directory, config)):
        refuse_gguf(given)
    if not directory.is_dir():
        raise UserError(f"{directory}: no such Megatron checkpoint")
    companions = config or directory / COMPANIONS
    if not companions.is_dir():
        raise UserError(f"{directory}: has no {COMPANIONS}/{CONFIG}: name a directory that has one (--config)")
    shape = read_shape(companions)
    if (directory / manifest.MANIFEST).is_file():
        problem = manifest.damage(directory)
        if problem:
            raise UserError(f"{directory}: {problem}")
    return megatron_format.MegatronCheckpoint(directory, shape), shape, companions


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
    """Write a Megatron checkpoint cut for tensor x pipeline ranks; returns the bytes of its tensors.

    check is called with the finished directory before it takes its place. Raises UserError where the ranks do not
    divide the model, where a tensor cannot be read, or where the disk refuses; then nothing is left behind.
    """
    check_layout(shape, tensor, pipeline, FLAGS)
    entries = megatron_format.table(shape, pipeline)
    size = _bytes(source, entries)

    with _output(target, size) as aside:
        # The tensors, one entry in memory at a time.
        written = megatron_format.write(aside, entries, shape, tensor, source.dtype, source.read)
        for number, entry in enumerate(written):
            report(number + 1, len(entries), entry.megatron)

        # What the way back needs; the manifest last, since it hashes all the rest.
        (aside / COMPANIONS).mkdir()
        hugging_face.copy_companions(companions, aside / COMPANIONS)
        manifest.write(aside)

        if check:
            check(aside)
    return size


def to_hf(
    source: Source, shape: ModelShape, companions: Path, target: Path, report: Report, check: Check | None = None
) -> int:
    """Write a Hugging Face directory; returns the bytes of its tensors. check, errors: see to_megatron."""
    entries = megatron_format.table(shape)
    size = _bytes(source, entries)
    types = {name: source.dtype(entry) for entry in entries for name in entry.hf}
    layout = {name: (dims, types[name]) for name, dims in hf_names.hf_shapes(shape).items()}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for number, entry in enumerate(entries):
            yield from zip(entry.hf, source.read(entry), strict=True)
            report(number + 1, len(entries), entry.megatron)

    # config.json first: its dtype has to be that of the weights.
    with _output(target, size) as aside:
        hugging_face.copy_companions(companions, aside)
        hugging_face.complete(companions, aside)
        _set_dtype(aside / CONFIG, set(types.values()))
        safetensors_files.write(tensors(), layout, aside)
        if check:
            check(aside)
    return size


def _bytes(source: Source, entries: list[Entry]) -> int:
    """Of all tensors of a checkpoint."""
    return sum(source.dtype(e).itemsize * sum(math.prod(s) for s in e.hf_shapes) for e in entries)


def _set_dtype(path: Path, types: set[torch.dtype]) -> None:
    """Leave config.json as it is unless the weights have another type than it says (a run may train in fp32)."""
    config = json.loads(path.read_text(encoding="utf-8"))
    said = config.get("dtype") or config.get("torch_dtype")
    names = {str(t).removeprefix("torch.") for t in types}
    if len(names) == 1 and said not in (None, *names):
        config.pop("torch_dtype", None)
        config["dtype"] = names.pop()
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _output(target: Path, size: int) -> Iterator[Path]:
    """hugging_face.written_aside with the disk's refusals in words; size: bytes that will be written."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if free < size:
            raise UserError(f"{target}: the weights take {size:,} bytes, the disk has {free:,} left")
        with hugging_face.written_aside(target) as aside:
            yield aside
    except (OSError, RuntimeError) as e:
        # torch's writer of archives tells of a refused write as a RuntimeError.
        cause = e if isinstance(e, OSError) else e.__context__
        if not isinstance(cause, OSError):
            raise
        full = cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = "; make room and start again, nothing was left behind" if full else ""
        said = os.strerror(cause.errno) if cause.errno else str(cause)
        raise UserError(f"{target}: cannot be written: {said}{advice}") from None
