"""Tests of the launcher, with ranks that only handle signals."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from forks import until

START = [sys.executable, "-c", "import sys; from megatron_brorl.cli import launch; launch._LAST_WORDS_S = 0.5; "
         "sys.exit(launch.launch(2, [sys.executable, *sys.argv[1:]]))"]  # fmt: skip

RESET = (
    "import os, signal, sys; [signal.signal(getattr(signal, n), signal.SIG_DFL) "
    "for n in ('SIGTERM', 'SIGINT', 'SIGHUP', 'SIGUSR1')]; os.execvp(sys.argv[1], sys.argv[1:])"
)
DEFAULT_SIGNALS = [sys.executable, "-c", RESET]

# A rank that forks a child, and at a signal waits for the file `saved` before it exits.
RANK = """
import os, sys, time
from pathlib import Path
from megatron_brorl import signals

folder, rank = Path(sys.argv[1]), os.environ["RANK"]

def wait(name):
    while not (folder / name).exists():
        time.sleep(0.01)

(folder / f"started_{rank}").touch()
wait("begin")
signals.install(saves=True)
if not (folder / "before_the_first_step").exists():
    signals.step_begins()
pid = os.fork()
if pid == 0:
    (folder / f"began_{rank}").touch()
    time.sleep(600)
while not signals.stop_requested():
    time.sleep(0.01)
(folder / f"saving_{rank}").touch()
wait("saved")
os.kill(pid, 9)
sys.exit(signals.SAVED)
"""


class Ranks:
    """A launcher with two ranks that run RANK and wait for files in `folder`."""

    def __init__(self, folder: Path, start: list[str], stdin: int = subprocess.DEVNULL, **environment: str) -> None:
        self.folder = folder
        (folder / "rank.py").write_text(RANK)
        # The launcher would inherit ignored signals if the tests were started by nohup or in the background.
        self.launcher = subprocess.Popen(
            [*DEFAULT_SIGNALS, *start, str(folder / "rank.py"), str(folder)],
            stdin=stdin,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self.processes: list[psutil.Process] = []

    def touch(self, name: str) -> None:
        (self.folder / name).touch()

    def reach(self, name: str, count: int = 2) -> None:
        until(lambda: all((self.folder / f"{name}_{rank}").exists() for rank in range(count)))
        self.processes = psutil.Process(self.launcher.pid).children(recursive=True)

    def end(self) -> tuple[int, str]:
        """Return exit code and stderr of the launcher."""
        stderr = self.launcher.communicate(timeout=60)[1]
        return self.launcher.returncode, stderr

    def gone(self) -> bool:
        return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in self.processes)

    def close(self) -> None:
        for process in [*self.processes, self.launcher]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.launcher.communicate()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path, START)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_a_signal_makes_the_ranks_save(started: Ranks, name: str) -> None:
    """SIGHUP is sent before the ranks have installed handlers and begun a step, so there is nothing to save."""
    started.reach("started")
    started.touch("before_the_first_step" if name == "SIGHUP" else "begin")
    if name != "SIGHUP":
        started.reach("began")
    started.launcher.send_signal(getattr(signal, name))
    started.touch("begin")
    if name != "SIGHUP":
        started.reach("saving")
        assert started.launcher.poll() is None
        started.touch("saved")
    code, stderr = started.end()
    assert (code, stderr.count(f"brorl: {name}: ")) == (75, 1)  # One rank announces that it saves.
    until(started.gone)


@pytest.mark.parametrize(
    ("on_terminal", "sent", "code"),
    [
        (True, [("SIGINT", 0.0), ("SIGINT", 0.3)], 128 + signal.SIGINT),
        (True, [("SIGINT", 0.0), ("SIGTERM", 1.2)], 75),  # torchrun adds a SIGTERM
        (False, [("SIGINT", 0.0), ("SIGINT", 0.3)], 75),  # one signal to the launcher and to all of its job
        (False, [("SIGUSR1", 0.0), ("SIGTERM", 1.2)], 75),  # a warning of Slurm, and the end of its job
        (False, [("SIGTERM", 0.0), ("SIGINT", 1.2)], 128 + signal.SIGINT),
    ],
    ids=range(5),
)
def test_only_a_person_s_second_signal_kills_the_ranks(tmp_path: Path, on_terminal: bool, sent: Any, code: int) -> None:
    with contextlib.closing(Ranks(tmp_path, START, os.openpty()[1] if on_terminal else subprocess.DEVNULL)) as ranks:
        ranks.touch("begin")
        ranks.reach("began")
        for name, seconds in sent:
            time.sleep(seconds)
            ranks.launcher.send_signal(getattr(signal, name))
        if code == 75:
            ranks.reach("saving")
            ranks.touch("saved")
        exit_code, stderr = ranks.end()
        assert (exit_code, stderr.endswith("brorl: a second signal, SIGINT, ended the ranks\n")) == (code, code != 75)
        until(ranks.gone)


def test_nohup_is_respected(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *START])
    ranks.touch("begin")
    ranks.reach("began")
    ranks.launcher.send_signal(signal.SIGHUP)
    ranks.launcher.send_signal(signal.SIGUSR1)
    ranks.touch("saved")
    code, stderr = ranks.end()
    assert (code, stderr.count("brorl: ")) == (75, 1)


TORCHRUN = [sys.executable, "-c", "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"]


@pytest.mark.parametrize("when", ["before they begin", "running", "stopped", "under torchrun"])
def test_ranks_and_their_children_end_if_the_launcher_is_killed(tmp_path: Path, when: str) -> None:
    torchrun = when == "under torchrun"
    count = 1 if torchrun else 2
    ranks = Ranks(tmp_path, TORCHRUN, TORCHELASTIC_RUN_ID="x", RANK="0") if torchrun else Ranks(tmp_path, START)
    try:
        ranks.reach("started", count)
        if when != "before they begin":
            ranks.touch("begin")
            ranks.reach("began", count)
            assert len(ranks.processes) == 2 * count
        if when == "stopped":
            for process in ranks.processes:
                process.suspend()
        ranks.launcher.kill()
        ranks.launcher.wait()  # the kernel signals the children before the parent can be waited for
        ranks.touch("begin")
        until(ranks.gone)
        assert when != "before they begin" or not list(tmp_path.glob("began_*"))
    finally:
        ranks.close()


@pytest.mark.parametrize(
    ("codes", "expected", "line"),
    [
        ((0, 0), 0, ""),
        ((75, 75), 75, ""),
        ((75, 0), 1, "brorl: ranks [1] had ended before"),
        ((75, 3), 3, ""),
        ((2, None), 2, ""),  # the other rank hangs
        ((75, -9), 128 + 9, "brorl: rank 1 was ended by SIGKILL (out of memory?)"),
        ((-11, None), 128 + 11, "brorl: rank 0 was ended by SIGSEGV"),
    ],
)
def test_the_exit_code_summarises_all_ranks(codes: tuple[int | None, ...], expected: int, line: str) -> None:
    program = f"""
import os, sys, time
code = {codes!r}[int(os.environ["RANK"])]
time.sleep(600) if code is None else os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)
"""
    result = subprocess.run([*START, "-c", program], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr.strip()) == (expected, line)


@pytest.mark.parametrize(("imported", "command"), [("pydantic", "metrics"), ("torch", "generate . 7-2")])
def test_ctrl_c_ends_a_command_with_one_line(tmp_path: Path, imported: str, command: str) -> None:
    """The command waits in the import of a module, which reads a named pipe."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / f"{imported}.py").write_text(f"open({str(tmp_path / 'pipe')!r}).read()")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "time": {}}\n')
    (tmp_path / "run.json").write_text('{"config": {"run": {"dir": "x"}}}')
    # A shell's background jobs, such as this test's, may ignore SIGINT.
    words = ["env", "--default-signal=INT", sys.executable, "-m", "megatron_brorl", *command.split()]
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    process = subprocess.Popen(words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE)
    with (tmp_path / "pipe").open("w"):  # waits for the import
        process.send_signal(signal.SIGINT)
        stderr = process.communicate(timeout=60)[1].decode()
    assert (process.returncode, stderr.split()) == (-signal.SIGINT, ["brorl:", "interrupted"])
