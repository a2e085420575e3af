"""A checksum of a tensor's bytes at the speed of memory, and the pair (name, tensor) that travels with one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import lru_cache

import torch
from torch import Tensor

_COLUMNS = 1024  # 8-byte words per row
_ROWS = 128  # rows summed both ways while they are in the cache: 1 MiB
_SIGN = 1 << 63


class Sealed(tuple[str, Tensor]):
    """(name, full tensor) with the checksum, [] int64, of the bytes that its sender meant to send under that name."""

    checksum: Tensor

    def __new__(cls, name: str, tensor: Tensor, checksum: Tensor) -> Sealed:
        self = super().__new__(cls, (name, tensor))
        self.checksum = checksum
        return self


def seal(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Sealed]:
    """Put a checksum on every pair, whose tensor has any shape."""
    for name, tensor in tensors:
        yield Sealed(name, tensor, checksum(name, tensor))


def checksum(name: str, tensor: Tensor) -> Tensor:
    """A 64-bit checksum, [] int64 on the tensor's device, of name, type, shape and contiguous bytes.

    The bytes are a table of 8-byte words; what does not fill a row, and then a word, stands behind it. Sums modulo 2^64
    of every row and every column, and the words and bytes behind the table, are scrambled together with their numbers
    and added up: a flipped bit, or words, rows or tensors that changed places, change the result. It guards against
    accidents, not against an adversary.
    """
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    if data.storage_offset() % 8:  # a view in the middle of something else: words must be aligned
        data = data.clone()

    # Whole rows of the table, in words; then words, then bytes.
    words = data[: len(data) // 8 * 8].view(torch.int64)
    full = len(words) // _COLUMNS * _COLUMNS
    values, places = [], []

    # Each sum or word goes with a number of its kind and place, so that none can change places unnoticed.
    def add(kind: int, what: Tensor) -> None:
        values.append(what)
        # Longer than most need, so that tensors of many sizes share the cached numbers.
        places.append(_places(kind, max(len(what), _COLUMNS), tensor.device)[: len(what)])

    # Every sum or word that counts, with its number.
    if full:
        parts = words[:full].view(-1, _COLUMNS).split(_ROWS)
        sums = [(part.sum(1), part.sum(0)) for part in parts]  # the second pass finds the part in the cache
        add(1, torch.cat([rows for rows, _ in sums]))
        add(2, torch.stack([columns for _, columns in sums]).sum(0))
    # What does not fill a row counts word by word, what does not fill a word byte by byte.
    if full < len(words):
        add(3, words[full:])
    if len(words) * 8 < len(data):
        add(4, data[len(words) * 8 :].to(torch.int64))

    # Scrambled together, with what the bytes do not say: name, type and shape.
    salt = _salt(f"{name} {tensor.dtype} {list(tensor.shape)}")
    # A tensor without bytes still has a name, a type and a shape.
    if not values:
        return torch.tensor(salt, device=tensor.device)
    # Sums wrap at 64 bits, as the definition has it.
    return _mix(torch.cat(values) + torch.cat(places)).sum() + salt


def _salt(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


@lru_cache(maxsize=64)
def _places(kind: int, length: int, device: torch.device) -> Tensor:
    """Scrambled numbers 0 .. length - 1 of one kind of sum, [length] int64."""
    return _mix(torch.arange(length, device=device) + (kind << 48))


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele et al. 2014) on every element, in place."""
    for bits, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        x ^= (x >> bits) & ((1 << (64 - bits)) - 1)  # a logical shift to the right
        x *= factor - (factor & _SIGN) * 2  # as a signed word
    return x
