"""A process of the reward pool: `python -m megatron_brorl.rewards.worker RESOLVE MEMORY_MB PARENT_PID`.

It runs verifiers and nothing else, never imports torch, and dies with its parent: idle, it sees the end of its input;
inside a verifier that hangs, an alarm of the kernel ends it soon after the pool should have.
"""

from __future__ import annotations

import importlib
import os
import pickle
import resource
import signal
import sys

from megatron_brorl.ranks import end_with
from megatron_brorl.rewards.protocol import BROKEN, ERROR, INVALID, LENGTH, OK, READY, Item, Record, pack
from megatron_brorl.rewards.returned import NoScore, score_of
from megatron_brorl.rewards.verifier import Verifier

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(resolve_path: str, memory_mb: int, parent: int) -> None:
    """Judge what comes on standard input, within the limits, until the parent is gone.

    resolve_path: "module:function" from a verifier's name to the verifier. parent: its process number.
    """
    # The terminal's signals are for the trainer; the limits are for hostile answers.
    end_with(parent)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _limit(resource.RLIMIT_AS, memory_mb << 20)  # more is a MemoryError here, not trouble elsewhere
    _limit(resource.RLIMIT_CORE, 0)  # no dump of each crash

    # The pipes are out of reach of what runs here under the numbers 0 and 1.
    requests, verdicts = os.dup(0), os.dup(1)
    silence = os.open(os.devnull, os.O_RDWR)
    os.dup2(silence, 0)
    os.dup2(silence, 1)  # some verifiers print

    # Verifiers are imported when an item first needs them.
    module, _, function = resolve_path.partition(":")
    resolve = getattr(importlib.import_module(module), function)
    known: dict[str, Verifier] = {}

    # A chunk at a time: imports first, which are not on any answer's clock.
    while (items := _read_chunk(requests)) is not None:
        for name in {item.verifier for item in items} - known.keys():
            known[name] = resolve(name)
        os.dup2(silence, 2)  # what went wrong until here is for the pool to read; from here on, verdicts say it
        os.write(verdicts, pack(Record(READY)))

        # A verdict is written before the next item begins, so that the pool knows where this process is.
        for item in items:
            os.write(verdicts, pack(judge(known[item.verifier], item)))


def judge(verify: Verifier, item: Item) -> Record:
    """The record of one item; what is no score is worth 0 and says what it was."""
    row, answer = item.row, item.answer
    try:
        return Record(OK, *score_of(verify(answer, row)))
    except NoScore as e:
        return Record(INVALID, reason=_line(e))
    except BaseException as e:  # SystemExit too: a verifier cannot end its worker
        reason = _line(e, type(e).__name__)

    # Many scorers raise on answers that they did not expect. One that raises on the reference too judges nothing.
    try:
        if row["answer"] is not None:
            verify(row["answer"], row)
    except BaseException as e:
        return Record(BROKEN, reason=_line(e, type(e).__name__))
    return Record(ERROR, reason=reason)


def _line(error: BaseException, kind: str = "") -> str:
    """First line of an exception."""
    try:
        text = "".join(str(error).strip().splitlines()[:1])
    except BaseException:  # of a verifier's own class of exceptions
        text = ""
    return ": ".join(part for part in (kind, text) if part)


def _limit(what: int, value: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _read_chunk(fd: int) -> list[Item] | None:
    """The next list of items; None when the parent is gone."""
    header = _read(fd, LENGTH.size)
    body = _read(fd, LENGTH.unpack(header)[0]) if header else None
    return pickle.loads(body) if body else None


def _read(fd: int, size: int) -> bytes | None:
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
