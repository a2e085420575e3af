"""Writing of safetensors files, one tensor in memory at a time, in any order.

The library's writer wants all tensors of a file at once. The format: 8 bytes little-endian length of the header, the
header as JSON, the bytes of the tensors without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from megatron_brorl.families.shape import WEIGHTS

INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 4 << 30
TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in TYPES.items()}

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # name -> shape and type, in the order of the files


def write(tensors: Iterable[tuple[str, Tensor]], layout: Layout, directory: Path) -> None:
    """Write exactly the tensors of `layout` to `directory`, as one file or as several with an index.

    A file has at most MAX_SHARD_BYTES of tensors, or one tensor. Raises ValueError if a tensor is missing, unknown,
    sent twice or of another shape or type.
    """
    shards = _shards(layout)
    missing = dict.fromkeys(layout)  # an ordered set
    with ExitStack() as files:
        places: dict[str, tuple[BinaryIO, int, str]] = {}
        for number, shard in enumerate(shards):
            # The names that transformers gives.
            name = WEIGHTS if len(shards) == 1 else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
            shard_file = files.enter_context((directory / name).open("wb"))
            header, offsets = _header(shard, layout)
            shard_file.write(header)
            places |= {n: (shard_file, len(header) + offset, name) for n, offset in offsets.items()}

        for name, tensor in tensors:
            if name not in missing:
                raise ValueError(f"export: {name} is {'sent twice' if name in layout else 'unknown'}")
            if (tuple(tensor.shape), tensor.dtype) != layout[name]:
                raise ValueError(f"export: {name} is {list(tensor.shape)} {tensor.dtype}, expected {layout[name]}")
            file, offset, _ = places[name]
            file.seek(offset)
            data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
            file.write(data.numpy().data)
            del missing[name]

    if missing:
        raise ValueError(f"export: {len(missing)} tensors missing, for example {next(iter(missing))}")

    if len(shards) > 1:
        total = sum(_bytes(layout[name]) for name in layout)
        index = {"metadata": {"total_size": total}, "weight_map": {n: places[n][2] for n in layout}}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _bytes(entry: tuple[tuple[int, ...], torch.dtype]) -> int:
    """Return the size of a tensor of this shape and type."""
    return math.prod(entry[0]) * entry[1].itemsize


def _shards(layout: Layout) -> list[list[str]]:
    """Return the tensor names of each file."""
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
    """Return the header of a file, and the offset of each tensor after it."""
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
