"""Several ranks on this machine, without torchrun: started, signalled and awaited together.

torch's own launcher kills ranks 30 seconds after a signal, which is in the middle of a real step; it opens a store on
all interfaces, whose state is a pickle; and its ranks go on when it is killed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import psutil

from megatron_brorl.ranks import LAUNCHER, LISTENER, SAVED, STOPPING, Signals

_LOOK_S = 0.1
_STOPPED_S = 60.0  # that a rank may be stopped (SIGSTOP) when another has ended, and sees it no more; then it is killed
_LAST_WORDS_S = 10.0  # for the other ranks to say what is wrong, when one has failed; then they are killed


def launch(processes: int, command: Sequence[str]) -> int:
    """Run `command` as so many ranks, for as long as they take; returns 0, SAVED or the first failing rank's code.

    SAVED (75): every rank left with it. A signal of ranks.STOPPING goes to the ranks, which save at their next step
    boundary however far that is; a second one kills them. 128 + number: a signal ended a rank, or all of them.
    """
    ranks: list[subprocess.Popen[bytes]] = []

    def forward(number: int) -> None:
        for process in ranks:
            process.send_signal(number)

    signals = Signals(forward, lambda _: _kill(ranks))
    # Held back until a rank has its handlers, for it inherits this: none is lost, and none finds a rank unprepared.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        for process in _start(processes, command):
            ranks.append(process)
        signals.catch()
        ended, stopped = _wait(ranks)
    finally:
        _kill(ranks)
    return _verdict(ended, stopped, signals)


def _start(processes: int, command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Ranks in sessions of their own: what the terminal sends reaches them once, through this process."""
    # An outer launcher's settings are not for these ranks; threads share the cores.
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    threads = str(max(1, (os.cpu_count() or 1) // processes))

    # Rank 0 inherits the socket where the ranks meet: no one else can take the port in between.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for rank in range(processes):
            told = {  # what torchrun would tell them, and who started them
                LAUNCHER: str(os.getpid()),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "LOCAL_WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(listener.getsockname()[1]),
            }
            if rank == 0:
                told[LISTENER] = str(listener.fileno())

            # The user's own OMP_NUM_THREADS wins over the share above; what a rank is told wins over both.
            yield subprocess.Popen(
                command,
                env={"OMP_NUM_THREADS": threads, **kept, **told},
                pass_fds=() if rank else (listener.fileno(),),  # only rank 0 listens
                start_new_session=True,  # what the terminal sends goes to the launcher alone
            )


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> tuple[dict[int, int], list[int]]:
    """Exit codes by rank, in the order in which they ended, and the ranks that were killed for being stopped."""
    ended: dict[int, int] = {}
    stopped: list[int] = []
    deadline, ran = float("inf"), time.monotonic()  # ran: when one that is left was last seen not to be stopped
    while len(ended) < len(ranks):
        found = [(code, rank) for rank, p in enumerate(ranks) if rank not in ended and (code := p.poll()) is not None]
        for code, rank in sorted(found):  # of two at once, the one that a signal ended is the cause
            ended[rank] = code
            if code not in (0, SAVED):
                deadline = min(deadline, time.monotonic() + _LAST_WORDS_S)

        # Ranks watch one another until one ends.
        left = [rank for rank in range(len(ranks)) if rank not in ended]
        if not ended or not all(_is_stopped(ranks[rank].pid) for rank in left):
            ran = time.monotonic()
        elif left and time.monotonic() - ran > _STOPPED_S:
            stopped, deadline = left, 0.0

        if time.monotonic() > deadline:
            _kill(ranks)
        time.sleep(_LOOK_S)
    return ended, stopped


def _is_stopped(pid: int) -> bool:
    with suppress(psutil.Error):
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return False


def _kill(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the ranks that are left, and what they have forked."""
    for process in ranks:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _verdict(ended: Mapping[int, int], stopped: Sequence[int], signals: Signals) -> int:
    """The launcher's exit code, with a line where the ranks could not say themselves what happened."""
    # All done, or all saved: there is nothing to explain.
    codes = set(ended.values())
    if codes in ({0}, {SAVED}):
        return codes.pop()

    # Which rank it was, and how.
    rank, code = next(((r, c) for r, c in ended.items() if c not in (0, SAVED)), (-1, 1))
    told = rank >= 0 and code > 0  # by the rank itself
    what = f"rank {rank} ended with exit code {code}"

    # Popen has minus the signal's number; shells report 128 plus the number.
    if code < 0:
        memory = " (out of memory?)" if code == -signal.SIGKILL and not signals.first else ""
        what = f"rank {rank} was ended by {signal.Signals(-code).name}{memory}"
        if rank in stopped:
            what = f"rank {rank} was stopped (SIGSTOP) for {_STOPPED_S:.0f} s when others had ended, and is killed"
        code = 128 - code
    elif rank < 0:
        what = f"ranks {sorted(r for r, c in ended.items() if c == 0)} had ended before"

    # What came from outside comes before what it led to.
    if signals.second:
        what, code = f"a second signal, {signal.Signals(signals.second).name}, ended the ranks", 128 + signals.second
    elif signals.first:
        what = f"{signal.Signals(signals.first).name} came, and not every rank has saved: {what}"
    elif told:
        # It has printed its own line.
        return code
    print(f"brorl: {what}", file=sys.stderr)
    return code
