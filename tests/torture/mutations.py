"""Seeded ways to spoil bytes, text and JSON values, for the fuzzers of this folder."""

from __future__ import annotations

import copy
import random
from typing import Any

# Values that each broke some program once: edges of types, sizes and encodings.
NASTY: list[Any] = [
    None, True, False, 0, 1, -1, 2, 2**31, 2**63, -(2**63) - 1, 10**23, 10**400, 0.0, -0.0, 1e-320, 1e30, 1e308,
    float("inf"), float("-inf"), float("nan"), "", " ", "0", "nan", "../x", "/etc/passwd", "\x00", "\ud800", "\u202e",
    "x" * 100_000, [], [[]], {}, [None], [1, "a", None], {"a": {"b": []}}, ["x"] * 1000,
]  # fmt: skip


def value(rng: random.Random) -> Any:
    """One of the nasty ones, or a random number or string."""
    kind = rng.randrange(4)
    if kind == 0:
        return rng.randint(-(10**6), 10**6)
    if kind == 1:
        return rng.uniform(-10, 10)
    return copy.deepcopy(rng.choice(NASTY))


def spoil_json(raw: Any, rng: random.Random) -> Any:
    """A copy with one to three places of it replaced, removed or added."""
    raw = copy.deepcopy(raw)
    for _ in range(rng.randint(1, 3)):
        raw = _spoil_place(raw, rng)
    return raw


def _spoil_place(raw: Any, rng: random.Random) -> Any:
    # A random place: the deeper, the likelier a leaf.
    if isinstance(raw, dict) and raw and rng.random() < 0.95:
        key = rng.choice(sorted(raw, key=str))
        kind = rng.random()
        if kind < 0.1:
            del raw[key]
        elif kind < 0.15:
            raw[rng.choice(["", "x", "rope_type", str(key).upper()])] = value(rng)
        else:
            raw[key] = _spoil_place(raw[key], rng)
        return raw
    if isinstance(raw, list) and raw and rng.random() < 0.9:
        i = rng.randrange(len(raw))
        raw[i] = _spoil_place(raw[i], rng)
        if rng.random() < 0.1:
            raw.append(value(rng))
        return raw
    return value(rng)


def spoil_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bits flipped, bytes cut out, doubled, overwritten or cut off."""
    raw = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        i = rng.randrange(len(raw) + 1)
        kind = rng.randrange(6)
        if kind == 0 and raw:
            raw[i % len(raw)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del raw[i : i + rng.choice([1, 7, 100])]
        elif kind == 2:
            raw[i:i] = raw[i : i + rng.choice([1, 7, 100])]
        elif kind == 3:
            raw[i : i + 8] = rng.randbytes(8)
        elif kind == 4:
            raw[i:i] = rng.choice([b"\x00", b"\xff\xfe", b"{" * 3000, b'"', b"[" * 100_000, b"9" * 5000, b"\n"])
        else:
            del raw[i:]
    return bytes(raw)
