"""Signals and process lifetime of a launcher and its ranks.

Imports only fast modules, because the launcher needs it, and because a rank uses it before anything else.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable

SAVED = 75  # exit code EX_TEMPFAIL: the state was saved; the same command continues the run
LAUNCHER = "BRORL_LAUNCHER"  # environment of a rank: the process id of `brorl --processes N`
LISTENER = "BRORL_LISTENER"  # environment of rank 0: the file descriptor of the rendezvous socket

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_SECOND_SIGNAL_S = 1.0  # a scheduler may send one signal to the launcher and to its ranks
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None  # looked up here, not in a fork


class StopSignals:
    """A handler of the STOPPING signals with one reaction to the first signal and another to the second.

    A second signal within a second of the first is taken for a copy of it and ignored.
    """

    def __init__(self, on_first: Callable[[int], object], on_second: Callable[[int], object]) -> None:
        """Both reactions are called with the number of the signal."""
        self.first = 0  # number of the first signal; 0 = none yet
        self.second = 0
        self._first_time = 0.0
        self._on_first = on_first
        self._on_second = on_second

    def catch(self) -> None:
        """Handle signals from now on, including those that were blocked until now."""
        for number in _not_ignored():
            signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)

    def _on_signal(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        if not self.first:
            self.first = number
            self._first_time = now
            self._on_first(number)
        elif now - self._first_time > _SECOND_SIGNAL_S:
            self.second = number
            self._on_second(number)


def _announce_stop(number: int) -> None:
    # A handler may interrupt a print of its own thread, so this does not use sys.stderr.
    if os.environ.get("RANK", "0") == "0":
        name = signal.Signals(number).name
        text = f"\nbrorl: {name}: the run ends after this step and saves its state; a second signal ends it at once\n"
        with contextlib.suppress(OSError):  # stderr may be a closed pipe
            os.write(2, text.encode())


_stop = StopSignals(_announce_stop, lambda number: os._exit(128 + number))


def install(saves: bool) -> None:
    """Install the signal handlers of a rank, and let it end with its launcher, and its forks with it.

    saves: the first signal makes `stop_requested` return True, and the second ends the process. Otherwise the first
    signal ends the process.
    """
    if LAUNCHER in os.environ:
        end_with(int(os.environ[LAUNCHER]))
    elif "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun
        end_with(os.getppid())
    _end_forks_with_this()
    if saves:
        _stop.catch()
        return
    for number in _not_ignored():
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def stop_requested() -> bool:
    """Return whether a signal has asked this process to save and stop."""
    return bool(_stop.first)


def end_with(parent: int) -> None:
    """Let the kernel kill this process when the thread of `parent` that started it ends, or now if it has ended.

    This works even if this process is stopped or deep in a library. Only Linux supports it.
    """
    if _prctl:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def _end_forks_with_this() -> None:
    """Megatron's checkpoint writers are forks. One that survived this process would hold the lock of run.dir."""
    parent = os.getpid()

    def in_child() -> None:
        nonlocal parent
        end_with(parent)
        parent = os.getpid()

    os.register_at_fork(after_in_child=in_child)


def _not_ignored() -> list[signal.Signals]:
    """Return the STOPPING signals without those that nohup or a shell's `&` made this process ignore at its start."""
    return [number for number in STOPPING if signal.getsignal(number) != signal.SIG_IGN]
