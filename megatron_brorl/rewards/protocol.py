"""What the pool and its workers say to one another, over two pipes.

Pool to worker: the length of a pickle (8 bytes), then the pickle, a list of items. Worker to pool: one record when it
has imported what the items need, then one per item, each written before the next item begins. So the pool knows at any
moment which item a worker is at. A record is a header and a JSON text of bounded length: the pool never unpickles what
comes back from a process that has handled hostile text.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron_brorl.rewards.verifier import MOST_REWARD, VerifierRow

LENGTH = struct.Struct("<Q")
HEADER = struct.Struct("<BdI")  # status, reward, bytes of the JSON that follows

READY = 255
STATUSES = ("ok", "error", "invalid", "broken")  # by their code
OK, ERROR, INVALID, BROKEN = range(4)

MOST_REASON = 300  # characters
_MOST_BYTES = 32768  # of the JSON: a reason and returned.MOST_PARTS parts, all of their characters escaped


class Item(NamedTuple):
    """An answer to be judged."""

    verifier: str  # as registry.verifier takes it
    row: VerifierRow
    answer: str


class Record(NamedTuple):
    """What a worker says of an item; with the status READY, that it begins."""

    status: int
    reward: float = 0.0
    reason: str = ""
    parts: Mapping[str, float] = {}


class Malformed(Exception):
    """A worker wrote what is no record."""


def pack(record: Record) -> bytes:
    """A record as bytes, its reason cut to MOST_REASON characters, all of them printable: it may quote an answer."""
    reason, parts = record.reason[:MOST_REASON], dict(record.parts)
    if not reason.isprintable():
        reason = "".join(c if c.isprintable() else "?" for c in reason)
    body = json.dumps({"reason": reason, "parts": parts} if parts or reason else {})
    return HEADER.pack(record.status, record.reward, len(body)) + body.encode("ascii")


def unpack(data: bytes) -> tuple[list[Record], bytes]:
    """The whole records at the start of `data`, and the rest. Raises Malformed where no worker meant it."""
    records, at = [], 0
    while len(data) - at >= HEADER.size:
        # The header says how much must be there, within bounds.
        status, reward, size = HEADER.unpack_from(data, at)
        if size > _MOST_BYTES or not (status == READY or status < len(STATUSES)) or not abs(reward) <= MOST_REWARD:
            raise Malformed
        end = at + HEADER.size + size
        if len(data) < end:
            break

        # The body, in which every type is checked.
        try:
            body = json.loads(data[at + HEADER.size : end].decode("utf-8"))
            records.append(_record(status, reward, body))
        except (ValueError, RecursionError):
            raise Malformed from None
        at = end
    return records, data[at:]


def _record(status: int, reward: float, body: Any) -> Record:
    reason, parts = (body.get("reason", ""), body.get("parts", {})) if isinstance(body, dict) else (None, None)
    if not isinstance(reason, str) or not isinstance(parts, dict):
        raise Malformed
    if not all(type(value) in (int, float) and abs(value) <= MOST_REWARD for value in parts.values()):
        raise Malformed
    return Record(status, reward, reason, parts)
