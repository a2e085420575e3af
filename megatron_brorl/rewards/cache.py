"""The verdicts of a step that its later rollouts share."""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import Future

from megatron_brorl.types import Verdict

_MOST_CHARS = 1 << 26  # of the answers kept, and of what keeping one costs beside them
_EACH = 512


class VerdictCache:
    """Verdicts, given or still to come, by what they are a function of; the oldest go where room is short."""

    def __init__(self, most_chars: int = _MOST_CHARS) -> None:
        self._most, self._chars = most_chars, 0
        self._kept: dict[Hashable, tuple[Future[Verdict], int, object]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable) -> Future[Verdict] | None:
        """The verdict of that key, unless it was given up or failed."""
        future, *_ = self._kept.get(key, (None,))
        if future is None or future.cancelled() or (future.done() and future.exception()):
            return None
        return future

    def put(self, key: Hashable, verdict: Future[Verdict], chars: int, alive: object) -> None:
        """Keep a verdict on an answer of so many characters. alive: what must not go while its identity is in a key."""
        self._drop(key)
        self._kept[key] = (verdict, chars + _EACH, alive)
        self._chars += chars + _EACH
        while self._chars > self._most:
            self._drop(next(iter(self._kept)))

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()
        self._chars = 0

    def _drop(self, key: Hashable) -> None:
        _, chars, _ = self._kept.pop(key, (None, 0, None))
        self._chars -= chars
