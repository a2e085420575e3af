"""`brorl --processes N` by its own launcher, whose ranks are forks: a run begins in a tenth of a second.

The launcher is a fork of the process that has imported everything (forks.py), and each rank is one of the launcher's,
so that the kernel ends it with the launcher as it does where a user types the command.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing.forkserver as server
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace

import forks
import psutil
from torture import hurt

from megatron_brorl.cli import launch
from megatron_brorl.ranks import LISTENER
from megatron_brorl.rollout.remote.process import PREFIX

STOPPED_S = 8.0  # that a rank may be stopped when another has ended
LAST_WORDS_S = 4.0  # what the launcher gives the other ranks once one has failed
_PR_SET_CHILD_SUBREAPER = 36  # <sys/prctl.h>


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Whoever is left behind by a run becomes a child of this process, where `left_behind` finds it."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)


def running() -> set[psutil.Process]:
    """What this process has started, and what that has, without multiprocessing's own."""
    return {p for p in psutil.Process().children(recursive=True) if is_a_run_s(p)}


def left_behind(before: set[psutil.Process], seconds: float = 5.0) -> list[str]:
    """What still runs of a run that has ended, after so long at most; it is killed. before: what ran before."""
    deadline = time.monotonic() + seconds
    while (left := running() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    told = []
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            told.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
            process.kill()
    return told


def is_a_run_s(process: psutil.Process) -> bool:
    """Whether it is none of multiprocessing's own; a dead one whose parent has gone is buried here."""
    if process.pid in (server._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid):
        return False
    try:
        if process.status() != psutil.STATUS_ZOMBIE:
            return True
        if process.ppid() == os.getpid():
            os.waitpid(process.pid, os.WNOHANG)
    except (psutil.NoSuchProcess, ChildProcessError):
        pass
    return False


def command_line(words: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """To its end; words: those after `brorl`, --processes among them."""
    place = words.index("--processes")
    joined = [*words[:place], f"--processes={words[place + 1]}", *words[place + 2 :]]
    return forks.command_line(joined, environment, main=_launcher)


def _launcher(arguments: list[str]) -> None:
    launch.subprocess = SimpleNamespace(Popen=_Rank)  # type: ignore[assignment]
    launch._LAST_WORDS_S, launch._STOPPED_S = LAST_WORDS_S, STOPPED_S
    forks._main(arguments)


class _Rank:
    """What the launcher needs of subprocess.Popen, as a fork of it."""

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int], start_new_session: bool
    ) -> None:
        assert start_new_session
        assert command[:3] == [sys.executable, "-m", "megatron_brorl"]
        self._code: int | None = None
        if pass_fds:
            _Rank.listener = pass_fds[0]
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            _be_a_rank(list(command[3:]), env)

    def poll(self) -> int | None:
        """As Popen's."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def send_signal(self, number: int) -> None:
        """As Popen's."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _be_a_rank(arguments: list[str], environment: Mapping[str, str]) -> None:
    """Never comes back to the launcher's frames."""
    code, hurts = 1, None
    try:
        os.setsid()
        os.environ.clear()
        os.environ.update(environment)
        if LISTENER not in environment:
            socket.socket(fileno=_Rank.listener).close()
        told = json.loads(environment.get(hurt.KEY, "{}"))
        if told and (told.get("lasting") or int(environment["RANK"]) == told["rank"]):
            # A fault that lasts is met by all ranks, once one has.
            mine = int(environment["RANK"]) == told["rank"]
            hurts = hurt.Hurt(told if mine else {**told, "where": ""})
        forks._main_without_figures(arguments)
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        if hurts:
            hurts.write_log()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def shared_memory() -> list[str]:
    """Folders of engines whose trainers are gone."""
    found = [p.name for p in Path("/dev/shm").glob(f"{PREFIX}*")]
    return sorted(name for name in found if not psutil.pid_exists(int(name.removeprefix(PREFIX).partition("-")[0])))
