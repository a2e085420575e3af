"""A checksum of a tensor's bytes, as fast as reading them, and the pair (name, tensor) that carries it."""

from __future__ import annotations

import functools
import hashlib

import torch
from torch import Tensor

_COLUMNS = 1024  # 8-byte words per row
_ROWS = 128  # rows summed at a time on a CPU: 1 MiB
_SIGN = 1 << 63  # sign bit of a word


class ChecksummedTensor(tuple[str, Tensor]):
    """The pair (name, full tensor), with the checksum [] int64 that its sender computed."""

    checksum: Tensor

    def __new__(cls, name: str, tensor: Tensor, checksum: Tensor) -> ChecksummedTensor:
        self = super().__new__(cls, (name, tensor))
        self.checksum = checksum
        return self


def checksum(name: str, tensor: Tensor) -> Tensor:
    """Return a 64-bit checksum, [] int64 on the tensor's device, of name, dtype, shape and contiguous bytes.

    The bytes, padded with zeros, form rows of 1,024 8-byte words. The sums of all rows and all columns modulo 2^64 are
    each mixed with their position and added up. A flipped bit changes the result, and so do words, rows or tensors that
    changed places. It guards against accidents, not against an adversary.
    """
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    padding = -len(data) % (8 * _COLUMNS)
    if padding or data.storage_offset() % 8:  # words must be aligned
        data = torch.cat((data, data.new_zeros(padding)))

    # On a CPU, both sums of a few rows are taken while they are in the cache.
    words = data.view(torch.int64).view(-1, _COLUMNS)
    parts = words.split(_ROWS) if words.is_cpu else (words,)
    rows = torch.cat([part.sum(1) for part in parts])
    columns = torch.stack([part.sum(0) for part in parts]).sum(0)
    sums = torch.cat((rows, columns))
    salt = hashlib.blake2b(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), digest_size=8).digest()
    return _mix(sums + _positions(len(sums), tensor.device)).sum() + int.from_bytes(salt, "little", signed=True)


@functools.lru_cache(maxsize=16)  # a model has few shapes
def _positions(count: int, device: torch.device) -> Tensor:
    return _mix(torch.arange(count, device=device))


def _mix(x: Tensor) -> Tensor:
    """Apply the finalizer of splitmix64 (Steele et al. 2014) to every element, in place."""
    for bits, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        x ^= (x >> bits) & ((1 << (64 - bits)) - 1)  # a logical shift to the right
        x *= factor - (factor & _SIGN) * 2  # as a signed word
    return x
