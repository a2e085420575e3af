"""Hugging Face directories in and out: each rank reads only its part; rank 0 writes what the reshard stream yields."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_brorl.errors import UserError
from megatron_brorl.hf_config import WEIGHTS, ModelShape
from megatron_brorl.models import hf_names
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.reshard.layout import Entry, to_local

INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 4 << 30


class Checkpoint:
    """The tensors of a Hugging Face directory by name, read lazily from one or many safetensors files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        index = directory / INDEX
        if index.is_file():
            try:
                self.files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            except (json.JSONDecodeError, KeyError, TypeError) as e:
                raise UserError(f"{index}: not a safetensors index: {e!r}") from None
        elif (directory / WEIGHTS).is_file():
            with self._open(WEIGHTS) as f:
                self.files = dict.fromkeys(f.keys(), WEIGHTS)
        else:
            raise UserError(f"{directory}: holds neither {WEIGHTS} nor {INDEX}")

    def _open(self, name: str) -> safe_open:
        path = self.directory / name
        if not path.is_file():
            raise UserError(f"{path}: missing, but named in {INDEX}; download the checkpoint again")
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as e:
            raise UserError(f"{path}: not a readable safetensors file: {e}") from None

    def check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raise UserError unless the files hold exactly these tensors (a tied lm_head may be stored as well)."""
        missing = [name for name in shapes if name not in self.files]
        if missing:
            raise UserError(
                f"{self.directory}: {len(missing)} tensors of config.json's model are missing, for example {missing[0]}"
            )
        known = {"lm_head.weight"} | shapes.keys()
        unknown = [n for n in self.files if n not in known and not n.endswith("rotary_emb.inv_freq")]
        if unknown:
            raise UserError(f"{self.directory}: unknown tensor {unknown[0]}; does config.json belong to it?")

    def read(self, entry: Entry) -> list[Tensor]:
        """The full tensors of an entry. Raises UserError where a shape is not what config.json says."""
        tensors = []
        for name, shape in zip(entry.hf, entry.hf_shapes, strict=True):
            with self._open(self.files[name]) as f:
                try:
                    tensor = f.get_tensor(name)
                except SafetensorError as e:
                    raise UserError(f"{self.directory / self.files[name]}: {name}: {e}") from None
            if tuple(tensor.shape) != shape:
                raise UserError(
                    f"{self.directory}: {name} has shape {list(tensor.shape)}, config.json implies {list(shape)}"
                )
            tensors.append(tensor)
        return tensors


def load(actor: torch.nn.Module, shape: ModelShape, grid: Grid, directory: str | Path, fused_norms: bool) -> None:
    """Fill this rank's stage from a Hugging Face directory, converting to the parameters' dtype."""
    checkpoint = Checkpoint(Path(directory))
    checkpoint.check(hf_names.hf_shapes(shape))
    parameters = dict(hf_names.global_parameters(actor))
    with torch.no_grad():
        for entry in hf_names.entries(shape, grid.pipeline, fused_norms):
            targets = [parameters.pop(entry.megatron)] if entry.stage == grid.pp_rank else []
            if entry.layout == "vocab" and shape.tied and grid.last_stage and not grid.first_stage:
                targets.append(parameters.pop("output_layer.weight"))  # the last stage's copy of a tied embedding
            if targets:
                part = to_local(entry, checkpoint.read(entry), shape.kv_heads, grid.tp_rank, grid.tensor)
                for target in targets:
                    target.copy_(part)
    if parameters:
        raise AssertionError(f"parameters without a Hugging Face name: {sorted(parameters)}")


def save(tensors: Iterable[tuple[str, Tensor]], source: str | Path, target: str | Path, dtype: str) -> None:
    """Write a Hugging Face directory: config.json and tokenizer from `source`, weights from `tensors`.

    Written aside and renamed, so that `target` is either absent, the old one, or complete. dtype is torch's name of
    the tensors' type ("float32"). The file size is bounded by MAX_SHARD_BYTES plus one tensor.
    """
    source, target = Path(source), Path(target)
    aside = target.with_name(f".{target.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)  # the older name of the same key
    config["dtype"] = dtype
    (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for path in sorted(source.iterdir()):
        keep = path.suffix in (".json", ".model", ".txt", ".jinja") and path.name not in ("config.json", INDEX)
        if keep and path.is_file():
            shutil.copy2(path, aside / path.name)
    _write_shards(tensors, aside)
    replace_directory(aside, target)


def _write_shards(tensors: Iterable[tuple[str, Tensor]], directory: Path) -> None:
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        save_file(pending, directory / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    size = 0
    for name, tensor in tensors:
        pending[name] = tensor.detach().to("cpu", copy=True)
        size += tensor.numel() * tensor.element_size()
        total += tensor.numel() * tensor.element_size()
        if size >= MAX_SHARD_BYTES:
            flush()
            size = 0
    if pending:
        flush()
    if len(shards) == 1:
        (directory / "shard-0").rename(directory / WEIGHTS)
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"shard-{i}").rename(directory / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def replace_directory(aside: Path, target: Path) -> None:
    """Put a finished directory in its place; a reader sees the old one, or none for an instant, or the new one."""
    for path in aside.rglob("*"):
        if path.is_file():
            with path.open("rb") as f:
                os.fsync(f.fileno())
    if target.exists():
        old = target.with_name(f".{target.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        aside.rename(target)
        shutil.rmtree(old)
    else:
        aside.rename(target)
    parent = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)
