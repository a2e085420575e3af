"""A rollout as a record of a file that is only appended to: self-contained, and with a checksum.

A head, a CRC-32 of all the rest, spans (two int64 each), token ids (int32) and log-probs (float32), little-endian.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from megatron_brorl.types import FinishReason, Rollout

_FINISH: tuple[FinishReason, ...] = get_args(FinishReason)
_MAGIC = b"brl1"
_HEAD = struct.Struct("<4s16sBII")  # magic, identity, place in _FINISH, spans, tokens
_CRC = struct.Struct("<I")
_FIXED = _HEAD.size + _CRC.size


@dataclass(frozen=True)
class Place:
    """Where a record lies, in bytes."""

    path: Path
    start: int
    size: int


def encoded(identity: bytes, rollout: Rollout) -> bytes:
    """A record of a rollout whose token_ids and log_probs are [G]; identity: up to 16 bytes, by which it is found."""
    tokens, spans = len(rollout.token_ids), len(rollout.spans)
    head = _HEAD.pack(_MAGIC, identity, _FINISH.index(rollout.finish), spans, tokens)
    ids, log_probs = rollout.token_ids.numpy(), rollout.log_probs.numpy()
    versions = struct.pack(f"<{2 * spans}q", *chain.from_iterable(rollout.spans))
    body = versions + ids.astype("<i4").tobytes() + log_probs.astype("<f4", copy=False).tobytes()
    return head + _CRC.pack(zlib.crc32(body, zlib.crc32(head))) + body


def decoded(record: bytes, sibling: int) -> Rollout | None:
    """The rollout of a record, token_ids and log_probs [G]; None where it is damaged."""
    head, body = record[: _HEAD.size], record[_FIXED:]
    if len(record) < _FIXED or _CRC.unpack_from(record, _HEAD.size)[0] != zlib.crc32(body, zlib.crc32(head)):
        return None
    _, _, finish, spans, tokens = _HEAD.unpack(head)
    versions = np.frombuffer(body, "<i8", 2 * spans).reshape(-1, 2).tolist()
    ids = np.frombuffer(body, "<i4", tokens, 16 * spans).astype(np.int64)
    log_probs = np.frombuffer(body, "<f4", tokens, 16 * spans + 4 * tokens).astype(np.float32)
    own = tuple((version, count) for version, count in versions)
    return Rollout(sibling, torch.from_numpy(ids), torch.from_numpy(log_probs), _FINISH[finish], own)


def places(path: Path) -> Iterator[tuple[bytes, Place]]:
    """Identity and place of every record of a file, up to one that is torn."""
    with open(path, "rb", buffering=0) as file:
        end, at = os.fstat(file.fileno()).st_size, 0
        while at + _FIXED <= end:
            magic, identity, _, spans, tokens = _HEAD.unpack(os.pread(file.fileno(), _HEAD.size, at))
            size = _FIXED + 16 * spans + 8 * tokens
            if magic != _MAGIC or at + size > end:
                return
            yield identity, Place(path, at, size)
            at += size
