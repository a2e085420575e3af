"""Safetensors files, one tensor in memory at a time, read and written at its place in the file.

safetensors' own writer wants all tensors of a file at once, its reader maps the whole file. The format: 8 bytes
little-endian length of the header, the header as JSON, the bytes of the tensors without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megatron_brorl.errors import UserError, shown
from megatron_brorl.model_shape import WEIGHTS

INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 4 << 30
TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in TYPES.items()}

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # name -> shape and type, in the order of the files


class Tensors:
    """The tensors of one file. Raises UserError where the file is none, or is cut short."""

    def __init__(self, path: Path) -> None:
        self.path = path

        # The header: where each tensor begins and ends.
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                size = path.stat().st_size
                # Any 8 bytes are a length: believed unchecked, one could ask for exabytes.
                if not 0 < length <= size - 8:
                    raise ValueError(f"a header of {length} bytes in a file of {size}")
                header: dict[str, Any] = json.loads(file.read(length))
            header.pop("__metadata__", None)  # free text, no tensor

            # Offsets count from the end of the header.
            self._begin = 8 + length
            self.types: dict[str, str] = {name: str(x["dtype"]) for name, x in header.items()}
            self.shapes = {name: tuple(map(int, x["shape"])) for name, x in header.items()}
            self._places = {name: (int(x["data_offsets"][0]), int(x["data_offsets"][1])) for name, x in header.items()}
            if not all(0 <= begin <= end for begin, end in self._places.values()):
                raise ValueError("a tensor that ends before it begins")
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as e:
            raise UserError(f"{path}: not a readable safetensors file: {shown(e)}") from None

        # Its figures have to agree with the file's size: downloads break off.
        for name, (begin, end) in self._places.items():
            # A type that is not read here has an unknown width: whoever reads the tensor refuses it.
            known = TYPES.get(self.types[name])
            if known and end - begin != _bytes((self.shapes[name], known)):
                raise UserError(f"{path}: not a readable safetensors file: {name} has {end - begin} bytes")

        # Otherwise a file cut short would fail only when its last tensors are read.
        end = self._begin + max((end for _, end in self._places.values()), default=0)
        if end != size:
            raise UserError(f"{path}: not a readable safetensors file: it has {size} bytes, its header says {end}")

    def read(self, name: str) -> Tensor:
        """One tensor of the header's shape, its type one of TYPES. Raises UserError where the file ends within it."""
        tensor = torch.empty(self.shapes[name], dtype=TYPES[self.types[name]])
        data = tensor.flatten().view(torch.uint8).numpy().data
        with self.path.open("rb", buffering=0) as file:
            file.seek(self._begin + self._places[name][0])
            done = 0
            while done < len(data):  # one call reads 2 GiB at most
                got = file.readinto(data[done:])
                if not got:
                    raise UserError(f"{self.path}: ends within {name}")
                done += got
        return tensor


def write(tensors: Iterable[tuple[str, Tensor]], layout: Layout, directory: Path) -> None:
    """Write exactly the tensors of `layout` to `directory`, as one file or as several with an index.

    A file has at most MAX_SHARD_BYTES of tensors, or one tensor. One tensor at a time is in memory. Raises ValueError
    where one is missing, unknown, sent twice or of another shape or type.
    """
    # Which tensor goes where is known before the first one comes.
    shards = _shards(layout)
    missing = dict.fromkeys(layout)  # an ordered set, for the message
    with ExitStack() as files:
        places: dict[str, tuple[BinaryIO, int, str]] = {}
        for number, shard in enumerate(shards):
            # Names as transformers writes them, with the number of files in each.
            name = WEIGHTS if len(shards) == 1 else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
            shard_file = files.enter_context((directory / name).open("wb"))
            header, offsets = _header(shard, layout)
            shard_file.write(header)
            places |= {n: (shard_file, len(header) + offset, name) for n, offset in offsets.items()}

        # Each goes to its place, in whatever order they come.
        for name, tensor in tensors:
            # What does not fit would overwrite its neighbour.
            if name not in missing:
                raise ValueError(f"export: {name} is {'sent twice' if name in layout else 'unknown'}")
            if (tuple(tensor.shape), tensor.dtype) != layout[name]:
                raise ValueError(f"export: {name} is {list(tensor.shape)} {tensor.dtype}, expected {layout[name]}")
            file, offset, _ = places[name]
            file.seek(offset)
            data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
            file.write(data.numpy().data)
            del missing[name]

    # A hole would read as zeros, so an incomplete export is an error.
    if missing:
        raise ValueError(f"export: {len(missing)} tensors missing, for example {next(iter(missing))}")

    # Several files need an index that says which one holds what.
    if len(shards) > 1:
        total = sum(_bytes(layout[name]) for name in layout)
        index = {"metadata": {"total_size": total}, "weight_map": {n: places[n][2] for n in layout}}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _bytes(entry: tuple[tuple[int, ...], torch.dtype]) -> int:
    """Of a tensor of this shape and type."""
    return math.prod(entry[0]) * entry[1].itemsize


def _shards(layout: Layout) -> list[list[str]]:
    """The names of each file's tensors."""
    shards: list[list[str]] = []
    size = 0
    for name, entry in layout.items():
        if not shards or size + _bytes(entry) > MAX_SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += _bytes(entry)
    return shards


def _header(names: list[str], layout: Layout) -> tuple[bytes, dict[str, int]]:
    """The beginning of a file, and where each tensor begins after it."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for name in names:
        shape, dtype = layout[name]
        offsets[name], begin = end, end
        end += _bytes(layout[name])
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text, offsets
