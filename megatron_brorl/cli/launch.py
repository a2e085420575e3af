"""Start several ranks on this machine without torchrun; they receive signals and end together.

torchrun kills ranks 30 seconds after a signal, in the middle of a real step; it opens a store on all
interfaces; and its ranks continue when it is killed.
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

from megatron_brorl.signals import LAUNCHER, LISTENER, SAVED, STOPPING, StopSignals

_POLL_S = 0.1
_LAST_WORDS_S = 10.0  # seconds that the other ranks have to report after one has failed; then they are killed


def launch(processes: int, command: Sequence[str]) -> int:
    """Run `command` in each of `processes` ranks, and return 0, SAVED (75) or the first failing rank's exit code.

    The result is SAVED if every rank returned it, and 128 + number if a signal ended a rank or all of them. A signal of
    signals.STOPPING is forwarded to the ranks, which save at their next step boundary. A second signal kills them.
    """
    ranks: list[subprocess.Popen[bytes]] = []

    def forward(number: int) -> None:
        for process in ranks:
            process.send_signal(number)

    signals = StopSignals(forward, lambda _: _kill(ranks))
    # Ranks inherit the mask and remove it after installing their handlers, so that no signal is lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        ranks.extend(_start(processes, command))  # keeps those that started before an error
        signals.catch()
        exit_codes = _wait(ranks)
    finally:
        _kill(ranks)
    return _exit_code(exit_codes, signals)


def _start(processes: int, command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start the ranks in their own sessions, so that signals of the terminal reach them only through the launcher."""
    # Drop the settings of an outer launcher. The ranks share the cores.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    threads = str(max(1, (os.cpu_count() or 1) // processes))

    # Rank 0 inherits the socket where the ranks meet, so that no other process can take the port.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for rank in range(processes):
            variables = {  # the variables that torchrun sets, and one of this launcher
                LAUNCHER: str(os.getpid()),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "LOCAL_WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(listener.getsockname()[1]),
            }
            if rank == 0:
                variables[LISTENER] = str(listener.fileno())

            # OMP_NUM_THREADS of the user overrides the share above.
            yield subprocess.Popen(
                command,
                env={"OMP_NUM_THREADS": threads, **environment, **variables},
                pass_fds=() if rank else (listener.fileno(),),
                start_new_session=True,
            )


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> dict[int, int]:
    """Return exit codes by rank, in the order in which the ranks ended."""
    exit_codes: dict[int, int] = {}
    deadline = float("inf")
    while len(exit_codes) < len(ranks):
        codes = [(process.poll(), rank) for rank, process in enumerate(ranks) if rank not in exit_codes]
        new_exits = [(code, rank) for code, rank in codes if code is not None]
        for code, rank in sorted(new_exits):  # negative first: a rank that a signal killed is the cause
            exit_codes[rank] = code
            if code not in (0, SAVED):
                deadline = min(deadline, time.monotonic() + _LAST_WORDS_S)
        if time.monotonic() > deadline:
            _kill(ranks)
        time.sleep(_POLL_S)
    return exit_codes


def _kill(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill the remaining ranks and their children."""
    for process in ranks:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _exit_code(exit_codes: Mapping[int, int], signals: StopSignals) -> int:
    """Return the launcher's exit code, and print a line if the ranks could not report themselves."""
    codes = set(exit_codes.values())
    if codes in ({0}, {SAVED}):
        return codes.pop()

    rank, code = next(((rank, code) for rank, code in exit_codes.items() if code not in (0, SAVED)), (-1, 1))
    if code < 0:  # Popen returns minus the signal number; shells return 128 plus it
        memory = " (out of memory?)" if code == -signal.SIGKILL and not signals.first else ""
        reason = f"rank {rank} was ended by {signal.Signals(-code).name}{memory}"
        code = 128 - code
    elif rank < 0:  # no rank failed, but only some have saved
        reason = f"ranks {sorted(r for r, c in exit_codes.items() if c == 0)} had ended before"
    elif signals.first:
        reason = f"rank {rank} ended with exit code {code}"
    else:
        return code  # the rank has reported the error itself

    if signals.second:
        reason = f"a second signal, {signal.Signals(signals.second).name}, ended the ranks"
        code = 128 + signals.second
    elif signals.first:
        reason = f"{signal.Signals(signals.first).name} came, and not every rank has saved: {reason}"
    print(f"brorl: {reason}", file=sys.stderr)
    return code
