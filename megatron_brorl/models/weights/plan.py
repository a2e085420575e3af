"""Which messages a refit consists of. Pure: no process group, no tensor; made once for a model and a layout.

Entries are taken in order and grouped into buckets of at most so many bytes, each of one pipeline stage. A bucket is
one gather over the tensor-parallel ranks of its stage and one broadcast over the stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_brorl.models.weights.layouts import Entry, local_shape

BUCKET_BYTES = 64 << 20
ALIGN = 64  # bytes between the places of two tensors in a message


@dataclass(frozen=True)
class Place:
    """Where one tensor lies in a message, in elements."""

    offset: int
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """The first element behind it."""
        return self.offset + math.prod(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Entries of one stage that travel together."""

    stage: int
    entries: tuple[Entry, ...]
    parts: tuple[Place | None, ...]  # of each entry in a rank's message to its tensor-parallel peers; None = replicated
    part_size: int  # elements of that message
    full: tuple[tuple[Place, ...], ...]  # of each entry's Hugging Face tensors in the message to the other stages
    full_size: int


@dataclass(frozen=True)
class Plan:
    """A refit from a layout of tensor x pipeline ranks."""

    buckets: tuple[Bucket, ...]
    kv_heads: int
    tensor: int
    pipeline: int
    names: tuple[str, ...]  # of the Hugging Face tensors, in the order of the stream


def make_plan(
    entries: Sequence[Entry], kv_heads: int, tensor: int, pipeline: int, item_bytes: int, limit: int = BUCKET_BYTES
) -> Plan:
    """Cut the table of a model into buckets.

    item_bytes: of one element. limit: bytes of full tensors in one bucket; an entry that is larger has its own.
    """
    groups: list[list[Entry]] = []
    size = 0
    for entry in entries:
        own = item_bytes * sum(math.prod(shape) for shape in entry.hf_shapes)
        if not groups or groups[-1][0].stage != entry.stage or size + own > limit:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += own
    names = tuple(name for entry in entries for name in entry.hf)
    buckets = tuple(_bucket(group, tensor, max(1, ALIGN // item_bytes)) for group in groups)
    return Plan(buckets, kv_heads, tensor, pipeline, names)


def _bucket(entries: Sequence[Entry], tensor: int, step: int) -> Bucket:
    """step: elements that offsets are multiples of."""
    parts: list[Place | None] = []
    full: list[tuple[Place, ...]] = []
    part_size = full_size = 0  # so far
    for entry in entries:
        part: Place | None = None
        if entry.layout != "replicated":
            part = Place(part_size, local_shape(entry, tensor))
            part_size = -(-part.end // step) * step
        parts.append(part)
        places = []
        for shape in entry.hf_shapes:
            places.append(Place(full_size, shape))
            full_size = -(-places[-1].end // step) * step
        full.append(tuple(places))
    return Bucket(entries[0].stage, tuple(entries), tuple(parts), part_size, tuple(full), full_size)
