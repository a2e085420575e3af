"""Megatron's distributed checkpoints (torch_dist), read and written one tensor at a time, without any process group.

Megatron's own saver needs all ranks with the whole model in memory. The format is torch.distributed.checkpoint's: every
tensor under one key with its global shape, in chunks at offsets; all layers share one key, with the layer in front.
It does not depend on the layout: a checkpoint loads under any other, and the tensor-parallel size that it is written
for decides only how it is cut into chunks and how far the vocabulary is padded.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter, Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo  # what .metadata holds of each chunk
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
from megatron_brorl.model_shape import ModelShape
from megatron_brorl.models import hf_names
from megatron_brorl.models.gpt import padded_vocab
from megatron_brorl.reshard.layout import Entry, to_hf, to_local

METADATA = ".metadata"
_BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
# Linears save an (empty) extra state per layer, without which Megatron refuses to load a checkpoint.
_EXTRA_STATES = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


def table(shape: ModelShape, pipeline: int = 1) -> list[Entry]:
    """Every parameter under its name in a checkpoint, where norms are always named as Transformer Engine names them."""
    return hf_names.entries(shape, pipeline, fused_norms=True)


def write(
    directory: Path,
    entries: Iterable[Entry],
    shape: ModelShape,
    tensor: int,
    dtype: Callable[[Entry], torch.dtype],
    read: Callable[[Entry], list[Tensor]],
) -> Iterator[Entry]:
    """Write a checkpoint for tensor x pipeline ranks (the stages are those of `entries`), one file for each rank.

    dtype(entry) is the type of an entry's tensors, read(entry) gives them in full, of its Hugging Face shapes; each is
    read once, and one entry is in memory at a time. Yields every entry when it was written; the checkpoint is complete
    when the iterator ends. Raises UserError where layers differ in type.
    """
    tensors: dict[str, Any] = {}
    results: list[WriteResult] = []  # where each chunk lies, for .metadata
    with ExitStack() as stack:
        files: dict[str, BinaryIO] = {}  # by name, opened with a rank's first chunk

        def put(rank: int, index: MetadataIndex, data: Tensor | io.BytesIO) -> None:
            """Append a chunk to a rank's file, and note where it lies."""
            name = f"__{rank}_0.distcp"
            if name not in files:
                files[name] = stack.enter_context((directory / name).open("wb"))
            file = files[name]
            begin = file.tell()
            if isinstance(data, io.BytesIO):
                file.write(data.getbuffer())
            else:
                torch.save(data.clone(), file)  # a view would be saved with all that it is a view of

            # A file holds nothing but chunks: without these figures none could be found.
            length = file.tell() - begin
            results.append(WriteResult(index, length, _StorageInfo(name, begin, length)))

        # Extra states, which are empty but have to be there.
        for layer in range(shape.layers):
            for part in _EXTRA_STATES:
                # Megatron's name for objects that are one per layer: shard i of n.
                key = f"decoder.layers.{part}._extra_state/shard_{layer}_{shape.layers}"
                empty = io.BytesIO()
                torch.save([None], empty)
                tensors[key] = BytesStorageMetadata()
                put(0, MetadataIndex(key), empty)  # whoever loads finds it through .metadata

        for entry in entries:
            # The key's global tensor, which all layers share.
            key, _ = _key(entry.megatron)
            properties = TensorProperties(dtype=dtype(entry))
            meta = TensorStorageMetadata(properties, torch.Size(_global_shape(entry, shape, tensor)), [])
            meta = tensors.setdefault(key, meta)  # the first layer makes it, the others add their chunks
            if meta.properties.dtype != properties.dtype:
                raise UserError(
                    f"{entry.hf[0]} is of type {properties.dtype}, the same tensor of other layers of "
                    f"{meta.properties.dtype}: a Megatron checkpoint stores all layers in one type"
                )

            # Each tensor-parallel rank's chunks, to the file of the rank that will read them.
            full = read(entry)
            # What is not cut is stored once, by tensor rank 0 of its stage.
            for rank in range(1 if entry.layout == "replicated" else tensor):
                for offsets, data in _chunks(entry, full, shape, rank, tensor):
                    chunk = ChunkStorageMetadata(torch.Size(offsets), data.shape)
                    index = MetadataIndex(key, chunk.offsets, len(meta.chunks))
                    meta.chunks.append(chunk)
                    put(entry.stage * tensor + rank, index, data)  # Megatron's order of ranks: tensor first
            del full
            yield entry

    # What Megatron looks for first; .metadata, without which there is no checkpoint, comes last.
    torch.save({}, directory / "common.pt")  # what is not a tensor: nothing
    (directory / "metadata.json").write_text(json.dumps(_BACKEND), encoding="utf-8")
    FileSystemWriter(directory).finish(Metadata(tensors), [results])


def _key(name: str) -> tuple[str, int | None]:
    """A parameter's key in the checkpoint, and its layer: decoder.layers.3.x -> (decoder.layers.x, 3)."""
    parts = name.split(".")
    if parts[:2] != ["decoder", "layers"]:
        return name, None
    return ".".join((*parts[:2], *parts[3:])), int(parts[2])


def _global_shape(entry: Entry, shape: ModelShape, tensor: int) -> tuple[int, ...]:
    """The shape of a key's tensor: the layers in front, and the vocabulary padded for `tensor` ranks."""
    rows, *rest = entry.hf_shapes[0]
    if entry.layout == "vocab":
        rows = padded_vocab(shape.vocab, tensor)
    elif entry.layout in ("qkv", "gate_up"):
        rows = sum(s[0] for s in entry.hf_shapes)
    layers = () if _key(entry.megatron)[1] is None else (shape.layers,)
    return (*layers, rows, *rest)


def _chunks(
    entry: Entry, full: list[Tensor], shape: ModelShape, rank: int, size: int
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """The chunks of one tensor-parallel rank with their offsets; gate and up are separate ones."""
    _, layer = _key(entry.megatron)
    local = to_local(entry, full, shape.kv_heads, rank, size)
    pieces = local.chunk(2) if entry.layout == "gate_up" else (local,)
    for number, piece in enumerate(pieces):
        offsets = [0] * piece.dim()
        if entry.layout == "gate_up":
            offsets[0] = (number * size + rank) * len(piece)
        elif entry.layout != "replicated":
            along = 1 if entry.layout == "columns" else 0
            offsets[along] = rank * piece.shape[along]
        yield (tuple(offsets), piece) if layer is None else ((layer, *offsets), piece.unsqueeze(0))


class MegatronCheckpoint:
    """The model's tensors in a distributed checkpoint, whoever wrote it and under whatever layout."""

    def __init__(self, directory: Path, shape: ModelShape) -> None:
        """Raises UserError where it is none, or is not one of a model of this shape."""
        self.directory, self.shape = directory, shape
        self._reader = FileSystemReader(directory)

        # Told before the reader tries: its own error would be a traceback.
        if not (directory / METADATA).is_file():
            raise UserError(f"{directory}: not a Megatron distributed checkpoint: {METADATA} is missing")

        # What tensors there are; a pickle, which breaks in many ways.
        try:
            metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(metadata, is_coordinator=True)
            # Objects, such as the extra states, are of no use here.
            self._tensors = {
                k: v for k, v in metadata.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)
            }
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError) as e:
            raise UserError(f"{directory / METADATA}: not readable: {type(e).__name__}: {e}") from None

        # They have to be those of config.json's model, no more and no fewer.
        for entry in table(shape):
            self._check(entry)

        # A tensor too many means another model. Optimizer state and a critic have other names, and are passed over.
        known = {_key(entry.megatron)[0] for entry in table(shape)}
        for key in self._tensors:
            if key not in known and key.startswith(("decoder.", "embedding.", "output_layer.")):
                raise UserError(f"{directory}: unknown tensor {key}; does config.json belong to it?")

    def _check(self, entry: Entry) -> None:
        """Raise UserError unless an entry is there in its shape; the vocabulary may be padded."""
        key, _ = _key(entry.megatron)
        if key not in self._tensors:
            raise UserError(f"{self.directory}: {key} of config.json's model is missing")
        found, wanted = tuple(self._tensors[key].size), _global_shape(entry, self.shape, 1)
        padded = entry.layout == "vocab" and found[0] >= wanted[0] and found[1:] == wanted[1:]
        if found != wanted and not padded:
            raise UserError(
                f"{self.directory}: {key} has shape {list(found)}, config.json implies {list(wanted)}: "
                "they do not belong together"
            )

    def dtype(self, entry: Entry) -> torch.dtype:
        """The type of an entry's tensors."""
        return self._tensors[_key(entry.megatron)[0]].properties.dtype

    def read(self, entry: Entry) -> list[Tensor]:
        """The full tensors of an entry, of its Hugging Face shapes.

        Raises UserError where a file is missing, cut short or broken.
        """
        # The part of the key's tensor that is this entry: one layer, and no padding.
        key, layer = _key(entry.megatron)
        meta = self._tensors[key]
        size = list(meta.size)
        offsets = [0] * len(size)
        if layer is not None:  # all layers are stacked in one tensor
            offsets[0], size[0] = layer, 1
        if entry.layout == "vocab":
            size[0] = self.shape.vocab  # the padding stays where it is

        # The chunks that it lies in; a checkpoint cut for many ranks has many.
        target = torch.empty(size, dtype=meta.properties.dtype)
        wanted = ChunkStorageMetadata(torch.Size(offsets), torch.Size(size))
        items = create_read_items_for_chunk_list(key, meta, [wanted])

        # A gap would leave memory that was never written among the weights.
        if sum(item.lengths.numel() for item in items) != target.numel():
            raise UserError(f"{self.directory}: {METADATA} lists chunks of {key} that do not make up the whole tensor")

        # Each chunk goes straight to its place in the target.
        try:
            self._reader.read_data(LoadPlan(items), _Into(target)).wait()
        except Exception as e:  # torch.load raises whatever the broken bytes lead it to
            what = str(e).splitlines()[0] if str(e) else type(e).__name__
            raise UserError(f"{self.directory}: {key} cannot be read, a file is missing or damaged: {what}") from None

        # Megatron's one matrix becomes the tensors that Hugging Face has: q, k and v, or gate and up.
        return to_hf(entry, [target if layer is None else target.squeeze(0)], self.shape.kv_heads)


class _Into(DefaultLoadPlanner):
    """Reads into one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self.target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The part of the target that a chunk fills."""
        view = self.target
        for dim, (begin, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, begin, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing is left to do: the view is part of the target."""
