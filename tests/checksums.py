"""Weights with checksums, as the trainer sends them to engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from megatron_brorl.ops.checksum import ChecksummedTensor, checksum


def with_checksums(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[ChecksummedTensor]:
    """Yield every pair of a name and a tensor, of any shape, with its checksum."""
    for name, tensor in tensors:
        yield ChecksummedTensor(name, tensor, checksum(name, tensor))
