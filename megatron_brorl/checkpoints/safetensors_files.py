"""Write the weights of a Hugging Face directory in the order in which they arrive."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 1 << 30
TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

ShapeAndType = tuple[tuple[int, ...], torch.dtype]
Layout = Mapping[str, ShapeAndType]  # by tensor name, in the order of the files


def write(tensors: Iterable[tuple[str, Tensor]], layout: Layout, directory: Path) -> None:
    """Write exactly the tensors of `layout` to `directory`, as one file or as several with an index.

    A file has at most MAX_SHARD_BYTES of tensors, or one tensor. A tensor is written when it arrives, and then freed.
    Raises ValueError if a tensor is missing, unknown, sent twice or of another shape or type.
    """
    split = split_state_dict_into_shards_factory(
        dict(layout),
        get_storage_size=_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=MAX_SHARD_BYTES,
    )
    missing = dict.fromkeys(layout)  # an ordered set
    positions: dict[str, int] = {}  # of the first byte of a tensor in its file, by tensor name
    for file, names in split.filename_to_tensors.items():
        positions |= _create(directory / file, {name: layout[name] for name in names})
    for name, tensor in tensors:
        if name not in missing:
            raise ValueError(f"export: {name} is {'sent twice' if name in layout else 'unknown'}")
        if (tuple(tensor.shape), tensor.dtype) != layout[name]:
            raise ValueError(f"export: {name} is {list(tensor.shape)} {tensor.dtype}, expected {layout[name]}")
        del missing[name]

        with (directory / split.tensor_to_filename[name]).open("r+b") as f:
            f.seek(positions[name])
            f.write(tensor.detach().cpu().flatten().view(torch.uint8).numpy().data)

    if missing:
        raise ValueError(f"export: {len(missing)} tensors missing, for example {next(iter(missing))}")
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _create(path: Path, layout: Layout) -> dict[str, int]:
    """Write the header of a file and return the position of each tensor's first byte.

    The format is the length of the header, the header in JSON, and the tensors without gaps.
    """
    names = {dtype: name for name, dtype in TYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    # The widest types come first, so every tensor is aligned.
    for name, (shape, dtype) in sorted(layout.items(), key=lambda item: -item[1][1].itemsize):
        end = offset + _bytes((shape, dtype))
        header[name] = {"dtype": names[dtype], "shape": shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # The tensors begin at a multiple of 8 bytes.
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    return {name: 8 + len(text) + header[name]["data_offsets"][0] for name in layout}


def _bytes(entry: ShapeAndType) -> int:
    """Return the size of a tensor of this shape and type."""
    return math.prod(entry[0]) * entry[1].itemsize
