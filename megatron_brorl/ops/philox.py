"""Keyed random numbers: Philox4x32-10 (Salmon et al., SC 2011), the same on every device and in any order.

The uniform of a rollout's next token is a function of (key, rollout index, position) only. The key is a hash of (run
seed, round, prompt id), and of the occurrence if a round samples a prompt more than once. So the numbers do not depend
on the batch in which a rollout is decoded (the last bits of the logits may), rollouts of a prompt never share a stream,
and a resumed step draws the same numbers again.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_M0, _M1 = 0xD2511F53, 0xCD9E8D57  # multipliers
_W0, _W1 = 0x9E3779B9, 0xBB67AE85  # added to the key in every round
_MASK = 0xFFFFFFFF


def stream_key(*parts: int | str) -> int:
    """Return a 63-bit key from any tuple of integers and strings (BLAKE2b of their unambiguous encoding)."""
    text = "\0".join(f"{type(p).__name__}:{p}" for p in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _multiply(constant: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and low 32 bits of constant * x, both below 2**32, without overflowing int64."""
    low_product = constant * (x & 0xFFFF)
    high_product = constant * (x >> 16)
    middle = high_product + (low_product >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low_product & 0xFFFF)


def philox(keys: Tensor, counters: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four words (32 bits in int64) for each key [B] (63 bits in int64) and counter (4 x [B], 32 bits each)."""
    k0, k1 = keys & _MASK, keys >> 32
    c0, c1, c2, c3 = counters
    for _ in range(10):
        high0, low0 = _multiply(_M0, c0)
        high1, low1 = _multiply(_M1, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def uniforms(keys: Tensor, index: Tensor, position: Tensor) -> Tensor:
    """Return a float64 in (0, 1) with 52 random bits for each (key, rollout index, token position), all [B] int64."""
    zero = torch.zeros_like(index)
    a, b, _, _ = philox(keys, (position, index, zero, zero))
    return (((a << 20) | (b >> 12)).double() + 0.5) * 2.0**-52
