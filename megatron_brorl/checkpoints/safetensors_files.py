"""Write the weights of a Hugging Face directory in the order in which they arrive."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save
from torch import Tensor

INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 1 << 30  # also the memory that `write` needs, unless a single tensor is larger
TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

ShapeAndType = tuple[tuple[int, ...], torch.dtype]
Layout = Mapping[str, ShapeAndType]  # by tensor name, in the order of the files


def write(tensors: Iterable[tuple[str, Tensor]], layout: Layout, directory: Path) -> None:
    """Write exactly the tensors of `layout` to `directory`, as one file or as several with an index.

    A file has at most MAX_SHARD_BYTES of tensors, or one tensor, and is written when all of its tensors have arrived.
    Raises ValueError if a tensor is missing, unknown, sent twice or of another shape or type.
    """
    split = split_state_dict_into_shards_factory(
        dict(layout),
        get_storage_size=_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=MAX_SHARD_BYTES,
    )
    missing = dict.fromkeys(layout)  # an ordered set
    shards: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        if name not in missing:
            raise ValueError(f"export: {name} is {'sent twice' if name in layout else 'unknown'}")
        if (tuple(tensor.shape), tensor.dtype) != layout[name]:
            raise ValueError(f"export: {name} is {list(tensor.shape)} {tensor.dtype}, expected {layout[name]}")
        del missing[name]

        # The sender may reuse the memory of a tensor.
        file = split.tensor_to_filename[name]
        shard = shards.setdefault(file, {})
        shard[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        if len(shard) == len(split.filename_to_tensors[file]):
            (directory / file).write_bytes(save(shards.pop(file), {"format": "pt"}))

    if missing:
        raise ValueError(f"export: {len(missing)} tensors missing, for example {next(iter(missing))}")
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _bytes(entry: ShapeAndType) -> int:
    """Return the size of a tensor of this shape and type."""
    return math.prod(entry[0]) * entry[1].itemsize
