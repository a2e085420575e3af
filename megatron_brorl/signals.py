"""Between a launcher and its ranks: what they tell each other, which signals save, and who ends with whom.

Imports nothing that takes time: the launcher needs it, and a rank before all else.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable

SAVED = 75  # EX_TEMPFAIL: the state was saved; start the same command again to go on
LAUNCHER = "BRORL_LAUNCHER"  # environment of a rank: the process number of `brorl --processes N`
LISTENER = "BRORL_LISTENER"  # environment of rank 0: the file descriptor of the socket where ranks meet

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_SECOND_SIGNAL_S = 1.0  # a scheduler may send one signal to the launcher and to its ranks
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None  # looked up here, not in a fork


class Signals:
    """The signals of STOPPING, which first ask for a stop; a second one, meant, demands it."""

    def __init__(self, ask: Callable[[int], object], demand: Callable[[int], object]) -> None:
        """ask(number), demand(number): called at the first and at the second one."""
        self.first = self.second = 0  # their numbers; 0 = none yet
        self._at = 0.0
        self._ask, self._demand = ask, demand

    def catch(self) -> None:
        """From here on; signals that were held back come now."""
        for number in _heeded():
            signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)

    def _on_signal(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        if not self.first:
            self.first, self._at = number, now
            self._ask(number)
        elif now - self._at > _SECOND_SIGNAL_S:
            self.second = number
            self._demand(number)


_asked = Signals(lambda _: None, lambda number: os._exit(128 + number))


def begin(saves: bool) -> None:
    """The first thing that a rank does: it ends with its launcher, its forks end with it, and it heeds signals.

    saves: a signal is noted for `stop_requested`, and only a second one ends the process. Else the first one does.
    """
    if LAUNCHER in os.environ:
        end_with(int(os.environ[LAUNCHER]))
    elif "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun
        end_with(os.getppid())
    _end_forks_with_this()
    if saves:
        _asked.catch()
        return
    for number in _heeded():
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def stop_requested() -> bool:
    """Whether a signal has asked this process to save and stop."""
    return bool(_asked.first)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when the thread of `parent` that started it ends; at once if it has.

    Nothing of this process is asked, which may be deep in a library or stopped. Linux alone can do that.
    """
    if _prctl:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def _end_forks_with_this() -> None:
    """Megatron's checkpoint writers are forks; one that is left behind would hold the lock of run.dir."""
    parent = os.getpid()

    def in_child() -> None:
        nonlocal parent
        end_with(parent)
        parent = os.getpid()

    os.register_at_fork(after_in_child=in_child)


def _heeded() -> list[signal.Signals]:
    """STOPPING, without what was ignored already when this process began: by nohup, or a shell's `&` in a script."""
    return [number for number in STOPPING if signal.getsignal(number) != signal.SIG_IGN]
