"""Records by their documented layout: "<BdI", then so many bytes of JSON."""

from __future__ import annotations

import json
import math
import struct

import pytest

from megatron_brorl.rewards.protocol import MOST_REASON, READY, Malformed, Record, pack, unpack


def raw(status: int, reward: float, body: object, size: int | None = None) -> bytes:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return struct.pack("<BdI", status, reward, len(text) if size is None else size) + text


def test_a_record_is_a_header_and_json() -> None:
    assert pack(Record(0, 0.5, "half", {"a": 1.0})) == raw(0, 0.5, {"reason": "half", "parts": {"a": 1.0}})
    assert pack(Record(READY)) == raw(READY, 0.0, {})


def test_records_come_back_from_any_cut() -> None:
    records = [
        Record(READY),
        Record(0, 1.0),
        Record(1, 0.0, "é \U0001f600", {}),
        Record(0, -2.5, "", {"x": -0.5, "y": 7.0}),
    ]
    data = b"".join(map(pack, records))
    for cut in range(len(data)):
        first, rest = unpack(data[:cut])
        second, left = unpack(rest + data[cut:])
        assert first + second == records
        assert left == b""


def test_reasons_are_short_and_printable() -> None:
    (record,), _ = unpack(pack(Record(2, 0.0, "a\x1b[31m\n\ud800" + "x" * 1000)))
    assert record.reason == ("a?[31m??" + "x" * 1000)[:MOST_REASON]


@pytest.mark.parametrize(
    "data",
    [
        raw(4, 0.0, {}),  # no such status
        raw(0, math.nan, {}),
        raw(0, 1e39, {}),
        raw(0, -math.inf, {}),
        raw(0, 1.0, {}, size=1 << 30),  # would be waited for
        raw(0, 1.0, b"not json"),
        raw(0, 1.0, b"\xff\xff"),
        raw(0, 1.0, b"[" * 30000),
        raw(0, 1.0, []),
        raw(0, 1.0, {"reason": 1}),
        raw(0, 1.0, {"parts": ["a"]}),
        raw(0, 1.0, {"parts": {"a": "1"}}),
        raw(0, 1.0, {"parts": {"a": True}}),
        raw(0, 1.0, {"parts": {"a": 10**400}}),
        raw(0, 1.0, b'{"parts": {"a": NaN}}'),
    ],
)
def test_what_no_worker_meant_is_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        unpack(pack(Record(0, 1.0)) + data)
