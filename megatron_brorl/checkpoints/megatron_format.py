"""Megatron's distributed checkpoints (torch_dist), read and written one tensor at a time, without a process group.

The format is torch.distributed.checkpoint's: every tensor has one key, its global shape, and chunks at offsets. All
layers share a key, with the layer as first dimension, and so do all experts of all layers, with the expert as second
dimension. A checkpoint can be loaded under any layout. The layout that it is written for determines only its chunks and
the vocabulary padding.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter, Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from megatron_brorl.errors import UserError
from megatron_brorl.families.shape import ModelShape
from megatron_brorl.models.gpt import padded_vocab
from megatron_brorl.models.weights import names
from megatron_brorl.models.weights.layouts import WeightEntry, to_hf, to_local

METADATA = ".metadata"
_BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
# Linear layers have an empty extra state, without which Megatron refuses to load a checkpoint.
_ATTENTION = ("self_attention.linear_qkv", "self_attention.linear_proj")
_MLP = ("linear_fc1", "linear_fc2")


def parameter_entries(shape: ModelShape, pipeline: int = 1) -> list[WeightEntry]:
    """Return every parameter under its name in a checkpoint. Norms have the names that Transformer Engine uses."""
    return names.entries(shape, pipeline, te_names=True)


def write(
    directory: Path,
    entries: Iterable[WeightEntry],
    shape: ModelShape,
    tensor: int,
    dtype: Callable[[WeightEntry], torch.dtype],
    read: Callable[[WeightEntry], list[Tensor]],
) -> Iterator[WeightEntry]:
    """Write a checkpoint for tensor x pipeline ranks (the stages are those of `entries`), one file for each rank.

    dtype(entry) returns the type of an entry's tensors. read(entry), which is called once, returns the full
    tensors in Hugging Face shapes. Yields every entry when it is written; the checkpoint is complete at the end. Raises
    UserError if layers differ in type.
    """
    tensors: dict[str, Any] = {}  # metadata by key
    results: list[WriteResult] = []
    with ExitStack() as stack:
        files: dict[str, BinaryIO] = {}

        def put(rank: int, index: MetadataIndex, data: Tensor | io.BytesIO) -> None:
            """Append a chunk to a rank's file, and record its position."""
            name = f"__{rank}_0.distcp"
            if name not in files:
                files[name] = stack.enter_context((directory / name).open("wb"))
            file = files[name]
            begin = file.tell()
            if isinstance(data, io.BytesIO):
                file.write(data.getbuffer())
            else:
                torch.save(data.clone(), file)  # a view would be saved with its whole storage
            length = file.tell() - begin
            results.append(WriteResult(index, length, _StorageInfo(name, begin, length)))

        for key in _extra_states(shape):
            empty = io.BytesIO()
            torch.save([None], empty)
            tensors[key] = BytesStorageMetadata()
            put(rank=0, index=MetadataIndex(key), data=empty)

        for entry in entries:
            key, _ = _key(entry)
            properties = TensorProperties(dtype=dtype(entry))
            meta = TensorStorageMetadata(properties, torch.Size(_global_shape(entry, shape, tensor)), [])
            meta = tensors.setdefault(key, meta)  # shared by all layers and experts
            if meta.properties.dtype != properties.dtype:
                raise UserError(
                    f"{entry.hf[0]} is of type {properties.dtype}, the same tensor of other layers of "
                    f"{meta.properties.dtype}: a Megatron checkpoint stores all layers in one type"
                )

            # Each chunk goes to the file of the rank that will read it; replicated tensors are stored once.
            full = read(entry)
            for rank in range(1 if entry.layout == "whole" else tensor):
                for offsets, data in _chunks(entry, full, shape, rank, tensor):
                    index = MetadataIndex(key, torch.Size(offsets), len(meta.chunks))
                    meta.chunks.append(ChunkStorageMetadata(torch.Size(offsets), data.shape))
                    put(entry.stage * tensor + rank, index, data)
            del full
            yield entry

    # Write .metadata last, because a directory without it does not count as a checkpoint.
    torch.save({}, directory / "common.pt")
    (directory / "metadata.json").write_text(json.dumps(_BACKEND), encoding="utf-8")
    FileSystemWriter(directory).finish(Metadata(tensors), [results])


def _extra_states(shape: ModelShape) -> Iterator[str]:
    """Yield the keys of the extra states of all linear layers."""
    mlp = "mlp.shared_experts" if shape.shared_ffn else "mlp"
    for layer in range(shape.layers):
        for part in (*_ATTENTION, *(f"{mlp}.{name}" for name in _MLP if shape.shared_ffn or not shape.experts)):
            yield f"decoder.layers.{part}._extra_state/shard_{layer}_{shape.layers}"
        for name, expert in product(_MLP, range(shape.experts)):
            shard = f"shard_{layer}.{expert}_{shape.layers}.{shape.experts}"
            yield f"decoder.layers.mlp.experts.experts.{name}._extra_state/{shard}"


def _key(entry: WeightEntry) -> tuple[str, tuple[int, ...]]:
    """Return a parameter's key in the checkpoint, and its place in the tensor of all layers and experts.

    decoder.layers.3.x -> (decoder.layers.x, (3,)), and decoder.layers.3.mlp.experts.local_experts.5.x ->
    (decoder.layers.mlp.experts.experts.x, (3, 5)).
    """
    parts = entry.megatron.split(".")
    if parts[:2] != ["decoder", "layers"]:
        return entry.megatron, ()
    layer = int(parts.pop(2))
    if entry.expert is None:
        return ".".join(parts), (layer,)
    i = parts.index("local_experts")
    return ".".join((*parts[:i], "experts", *parts[i + 2 :])), (layer, entry.expert)


def _global_shape(entry: WeightEntry, shape: ModelShape, tensor: int) -> tuple[int, ...]:
    """Return the shape of a key's tensor: layers and experts in front, the vocabulary padded for `tensor` ranks."""
    rows = padded_vocab(shape.vocab, tensor) if entry.layout == "vocab" else sum(s[0] for s in entry.hf_shapes)
    in_front = (shape.layers, shape.experts)[: len(_key(entry)[1])]
    return (*in_front, rows, *entry.hf_shapes[0][1:])


def _chunks(
    entry: WeightEntry, full: list[Tensor], shape: ModelShape, rank: int, size: int
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yield the offsets and data of the chunks of one of `size` tensor-parallel ranks; gate and up are two chunks."""
    _, place = _key(entry)
    local = to_local(entry, full, shape.kv_heads, rank, size)
    pieces = local.chunk(2) if entry.layout == "gate_up" else (local,)
    for number, piece in enumerate(pieces):
        offsets = [0] * piece.dim()
        if entry.layout == "gate_up":
            offsets[0] = (number * size + rank) * len(piece)
        elif entry.layout != "whole":
            dim = 1 if entry.layout == "columns" else 0
            offsets[dim] = rank * piece.shape[dim]
        yield (*place, *offsets), piece[(None,) * len(place)]  # layer and expert become dimensions of size 1


class MegatronCheckpoint:
    """The model's tensors in a distributed checkpoint of any layout."""

    def __init__(self, directory: Path, shape: ModelShape, entries: Sequence[WeightEntry]) -> None:
        """Raise UserError if the directory is not a checkpoint of a model of this shape with these parameters."""
        self.directory = directory
        self.shape = shape
        self._reader = FileSystemReader(directory)
        if not (directory / METADATA).is_file():
            raise UserError(f"{directory}: not a Megatron distributed checkpoint: {METADATA} is missing")
        try:
            metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(metadata, is_coordinator=True)
            self._tensors = {
                k: v for k, v in metadata.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)
            }
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError) as e:
            raise UserError(f"{directory / METADATA}: not readable: {type(e).__name__}: {e}") from None

        # An additional tensor means another model. Optimizer states and critics have other names.
        for entry in entries:
            self._check(entry)
        known = {_key(entry)[0] for entry in entries}
        for key in self._tensors:
            if key not in known and key.startswith(("decoder.", "embedding.", "output_layer.")):
                raise UserError(f"{directory}: unknown tensor {key}; does config.json belong to it?")

    def _check(self, entry: WeightEntry) -> None:
        """Raise UserError unless an entry is stored in its shape; the vocabulary may be padded."""
        key, _ = _key(entry)
        if key not in self._tensors:
            raise UserError(f"{self.directory}: {key} of config.json's model is missing")
        shape = tuple(self._tensors[key].size)
        expected = _global_shape(entry, self.shape, tensor=1)
        padded = entry.layout == "vocab" and shape[0] >= expected[0] and shape[1:] == expected[1:]
        if shape != expected and not padded:
            raise UserError(
                f"{self.directory}: {key} has shape {list(shape)}, config.json implies {list(expected)}: "
                "they do not belong together"
            )

    def dtype(self, entry: WeightEntry) -> torch.dtype:
        return self._tensors[_key(entry)[0]].properties.dtype

    def read(self, entry: WeightEntry) -> list[Tensor]:
        """Return the full tensors of an entry in Hugging Face shapes. Raises UserError if a file is damaged."""
        key, place = _key(entry)
        meta = self._tensors[key]
        entry_size = meta.size[len(place) :]
        size = [*(1 for _ in place), *entry_size]
        offsets = [*place, *(0 for _ in entry_size)]
        if entry.layout == "vocab":
            size[0] = self.shape.vocab  # without the padding

        target = torch.empty(size, dtype=meta.properties.dtype)
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(size))
        items = create_read_items_for_chunk_list(key, meta, [chunk])
        # A gap would leave uninitialised memory among the weights.
        if sum(item.lengths.numel() for item in items) != target.numel():
            raise UserError(f"{self.directory}: {METADATA} lists chunks of {key} that do not cover the whole tensor")

        try:
            self._reader.read_data(LoadPlan(items), _ReadInto(target)).wait()
        except Exception as e:  # torch.load of damaged bytes may raise anything
            reason = str(e).splitlines()[0] if str(e) else type(e).__name__
            raise UserError(f"{self.directory}: {key} cannot be read, a file is missing or damaged: {reason}") from None

        return to_hf(entry, [target.view(size[len(place) :])], self.shape.kv_heads)


class _ReadInto(DefaultLoadPlanner):
    """Reads chunks directly into one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self.target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the part of the target that a chunk fills."""
        view = self.target
        for dim, (begin, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, begin, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the view is part of the target."""
