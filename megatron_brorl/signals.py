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
_COPY_S = 1.0  # A scheduler may send one signal to the launcher and to its ranks.
_COPY_ON_TERMINAL_S = 0.1  # A wrapper may forward a Ctrl-C that the terminal has sent to the whole process group.
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None  # looked up here, not in a fork


class StopSignals:
    """A handler of the STOPPING signals with one reaction to the first signal and another to the second.

    A second signal is a SIGINT, or the first signal again. Other signals do not count, because launchers and schedulers
    send a SIGTERM after a SIGINT or SIGUSR1 and then wait. A second signal within _COPY_S of the first counts as a copy
    and is ignored. For a SIGINT on a terminal, the limit is _COPY_ON_TERMINAL_S.
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
        elif number in (self.first, signal.SIGINT):
            on_terminal = number == signal.SIGINT and any(map(os.isatty, range(3)))  # stdin, stdout or stderr
            if now - self._first_time > (_COPY_ON_TERMINAL_S if on_terminal else _COPY_S):
                self.second = number
                self._on_second(number)


def _on_first(number: int) -> None:
    text = "the run ends after this step and saves its state; a second Ctrl-C (SIGINT) ends it at once"
    if not _step_has_begun:
        text = "the run ends before its first step, so there is nothing to save; the same command starts it again"
    if os.environ.get("RANK", "0") == "0":
        # A handler may interrupt a print of its own thread, so this does not use sys.stderr.
        with contextlib.suppress(OSError):  # stderr may be a closed pipe
            os.write(2, f"\nbrorl: {signal.Signals(number).name}: {text}\n".encode())
    if not _step_has_begun:
        os._exit(SAVED)


_stop = StopSignals(_on_first, lambda number: os._exit(128 + number))
_step_has_begun = False


def step_begins() -> None:
    """Let signals from now on wait for the end of the step, because it may be worth saving."""
    global _step_has_begun
    _step_has_begun = True


def install(saves: bool) -> None:
    """Install the signal handlers of a rank. The rank ends with its launcher, and its forks end with the rank.

    saves: the first signal makes `stop_requested` return True, or ends the process with SAVED before `step_begins`. The
    second signal ends the process. Without saves, the first signal ends the process.
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
    """Let the kernel kill this process when the thread of `parent` that started it ends, or at once if it has ended.

    This works even if this process is stopped or deep in a library. Only Linux supports it.
    """
    if _prctl:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def _end_forks_with_this() -> None:
    """Let forks end with this process. A checkpoint writer of Megatron that survived it would hold run.dir's lock."""
    parent = os.getpid()

    def in_child() -> None:
        nonlocal parent
        end_with(parent)
        parent = os.getpid()

    os.register_at_fork(after_in_child=in_child)


def _not_ignored() -> list[signal.Signals]:
    """Return the STOPPING signals without those that nohup or a shell's `&` made this process ignore at its start."""
    return [number for number in STOPPING if signal.getsignal(number) != signal.SIG_IGN]
