"""The checksum against the same sums in Python integers."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from megatron_brorl.ops.checksum import checksum

SIZES = [0, 1, 3, 8, 9, 1000, 1024 * 8, 1024 * 8 + 5, 1024 * 8 * 300 + 123]
MASK = 2**64 - 1


def by_hand(name: str, tensor: torch.Tensor) -> int:
    """Compute the checksum as described in ops/checksum.py, with integers of unlimited size."""
    data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    words = np.frombuffer(data + bytes(-len(data) % 8192), dtype="<u8").tolist()
    rows = [sum(words[i : i + 1024]) for i in range(0, len(words), 1024)]
    columns = [sum(words[i::1024]) for i in range(1024)]
    salt = f"{name} {tensor.dtype} {list(tensor.shape)}".encode()
    total = int.from_bytes(hashlib.blake2b(salt, digest_size=8).digest(), "little")
    total += sum(mix(v + mix(i)) for i, v in enumerate(rows + columns))
    return total & MASK


def mix(x: int) -> int:
    x &= MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def noise(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", SIZES)
def test_equals_integer_arithmetic(size):
    data = noise(size)
    assert int(checksum("a", data)) & MASK == by_hand("a", data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_types_and_views(dtype):
    x = torch.randn(37, 41, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert int(checksum("x", x)) & MASK == by_hand("x", x)
    assert torch.equal(checksum("x", x.t()), checksum("x", x.t().contiguous()))
    inside = torch.cat((torch.zeros(1, dtype=dtype), x.flatten()))[1:].view(37, 41)  # starts between two words
    assert torch.equal(checksum("x", inside), checksum("x", x))
