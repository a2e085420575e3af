"""A verifier behind an address: "http://host:port/path" or https.

A batch of answers is one POST of {"items": [{"response": text, "row": {id, prompt, answer, metadata}}, ...]}, to which
the service replies {"scores": [{"reward": number, "reason": text, "parts": {name: number}}, ...]} in the order of the
items; reason and parts may be left out. Its scores are judged as a function's would be (rewards/returned.py).
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import SplitResult, urlsplit

from megatron_brorl.errors import UserError
from megatron_brorl.rewards.extract import full
from megatron_brorl.rewards.returned import NoScore, score_of
from megatron_brorl.rewards.verifier import Entry, Score, VerifierRow

_ATTEMPTS = 3
_PAUSE_S = 0.1  # before the second attempt, and twice that before the third
_SHARE = 0.8  # of reward.timeout_s, after which the pool would kill who waits
_MOST_BYTES = 16 << 20  # of a reply
_MOST_CHARS = 1 << 20  # reward.max_chars is the limit


class _Unanswered(Exception):
    """No usable reply; says why."""


def is_service(name: str) -> bool:
    """Whether a verifier's name is an address."""
    return name.startswith(("http://", "https://"))


def entry(name: str, timeout_s: float) -> Entry:
    """The entry of the service at that address; timeout_s: config key reward.timeout_s, here for a whole batch."""
    return Entry(
        about="a service that answers POST",
        load=lambda: Service(name, _SHARE * timeout_s),
        find=full,
        check_row=_any_row,
        max_chars=_MOST_CHARS,
        pure=False,  # it may be a model, and its answers a draw
        foreign=True,
    )


def check_reached(name: str, timeout_s: float) -> None:
    """Raise UserError unless the service replies to an empty batch with no scores."""
    try:
        Service(name, _SHARE * timeout_s).post([])
    except _Unanswered as e:
        raise UserError(f"verifier {name}: {e}; start the service, or mend the address") from None


class Service:
    """A verifier that is asked over HTTP; for one thread."""

    def __init__(self, url: str, deadline_s: float) -> None:
        self._url, self._deadline_s = urlsplit(url), deadline_s

    def __call__(self, answer: str, row: VerifierRow) -> Score:
        """The score of one answer. Raises NoScore where the service gives none."""
        returned = self.many([(answer, row)])[0]
        if isinstance(returned, NoScore):
            raise returned
        return score_of(returned)

    def many(self, asked: Sequence[tuple[str, VerifierRow]]) -> list[Any]:
        """What the service returned for each answer; a NoScore for each where it did not answer."""
        try:
            return self.post([{"response": answer, "row": row} for answer, row in asked])
        except _Unanswered as e:
            return [NoScore(str(e))] * len(asked)

    def post(self, items: list[dict[str, Any]]) -> list[Any]:
        """The scores of a batch, of which there are as many as items. Raises _Unanswered."""
        body = json.dumps({"items": items}, default=str).encode()
        end = time.monotonic() + self._deadline_s

        # What may pass is tried again: a refused connection, a service that is restarted.
        for attempt in range(_ATTEMPTS):
            try:
                status, reply = _exchange(self._url, body, end)
                failed = f"HTTP status {status}" if status >= 500 else ""
            except (OSError, http.client.HTTPException, ValueError) as e:
                status, reply, failed = 0, b"", str(e) or type(e).__name__
            # Longer each time, and never past the deadline.
            pause = _PAUSE_S * 2**attempt
            if not failed or attempt == _ATTEMPTS - 1 or time.monotonic() + pause >= end:
                break
            time.sleep(pause)

        # A reply that is none will not become one.
        if failed or status != 200:
            raise _Unanswered(f"the service cannot be reached: {failed or f'HTTP status {status}'}")
        try:
            scores = json.loads(reply)["scores"]
        except (ValueError, KeyError, TypeError, RecursionError):
            scores = None
        if not isinstance(scores, list) or len(scores) != len(items):
            raise _Unanswered(f'the service did not reply {{"scores": [...]}} with {len(items)} scores')
        return scores


def _exchange(url: SplitResult, body: bytes, end: float) -> tuple[int, bytes]:
    """Status and reply of one POST that is over by `end`, in time.monotonic's seconds."""
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = kind(url.hostname or "", url.port, timeout=max(0.01, end - time.monotonic()))
    try:
        path = (url.path or "/") + (f"?{url.query}" if url.query else "")
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()

        # Piece by piece: a timeout of the socket is for each of them.
        reply = b""
        while piece := response.read1(1 << 16):
            reply += piece
            if time.monotonic() > end:
                raise TimeoutError("timed out")
            if len(reply) > _MOST_BYTES:
                raise ValueError(f"its reply has more than {_MOST_BYTES} bytes")
        return response.status, reply
    finally:
        connection.close()


def _any_row(row: VerifierRow, where: str) -> None:
    """The service knows what a row must have."""
