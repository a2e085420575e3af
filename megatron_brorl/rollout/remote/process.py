"""One engine process: its private folder, its environment, how it starts and how it is ended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import megatron_brorl
from megatron_brorl.errors import UserError
from megatron_brorl.ranks import LAUNCHER
from megatron_brorl.rollout.registry import ENGINES
from megatron_brorl.rollout.remote.options import EngineOptions
from megatron_brorl.rollout.remote.segments import unlink_segments

PREFIX = "brorl-engine-"
_MPI = ("PMI_", "PMIX_", "MPI_", "OMPI_", "SLURM_")  # workers would take themselves for ranks of the launcher's
# What a process says, in whatever words, of which another try on other ports may do better.
_PORT_TAKEN = re.compile(
    r"address already in use|EADDRINUSE|failed to bind|port \S+ (is )?(already )?(in use|taken)", re.I
)
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", LAUNCHER, "OMP_NUM_THREADS")


def make_folder(parent: str, key: str) -> Path:
    """A private folder in memory for one engine; those of trainers that are gone are removed.

    key: of the configuration, that names `parent`. Raises UserError where `parent` cannot be written.
    """
    where = Path(parent)
    with contextlib.suppress(OSError):
        for old in where.glob(f"{PREFIX}*"):
            if not Path("/proc", old.name.removeprefix(PREFIX).partition("-")[0]).exists():
                shutil.rmtree(old, ignore_errors=True)

    try:
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=where))
        # Only this package is put before the other environment's own: its torch must be the one it came with.
        (folder / "code").mkdir()
        (folder / "code" / "megatron_brorl").symlink_to(Path(megatron_brorl.__file__).parent.resolve())
    except OSError as e:
        raise UserError(f"{key} = {parent}: cannot be written: {e.strerror}; name another folder") from None
    return folder


def address(folder: Path) -> str:
    """Of the socket of the engine whose folder this is."""
    return f"ipc://{folder}/socket"


class EngineProcess:
    """A running engine process. It ends with this one."""

    def __init__(self, python: str, folder: Path, options: EngineOptions, devices: Sequence[int], log: Path) -> None:
        """python: interpreter of the engine's environment. devices: CUDA devices of the engine.

        log: file that its output is appended to. Raises UserError where the interpreter does not start.
        """
        kind = ENGINES[options.engine]

        self.log = log
        self._killed = False
        self._from = log.stat().st_size if log.exists() else 0  # of the log: what stands before is of other processes

        # Nothing of a process that was killed may be in the way.
        (folder / "socket").unlink(missing_ok=True)
        log.parent.mkdir(parents=True, exist_ok=True)

        # It ends when its standard input does. A session of its own, so that its children can be ended with it.
        with open(log, "ab") as output:
            try:
                self._process = subprocess.Popen(
                    [
                        # Found by the link in the folder (make_folder).
                        *(python, "-m", "megatron_brorl.rollout.remote.server", address(folder)),
                        json.dumps(dataclasses.asdict(options)),
                    ],
                    stdin=subprocess.PIPE,  # never written to: it closes with this process, however that ends
                    stdout=output,  # of which the process has its own copy
                    stderr=subprocess.STDOUT,
                    env=environment(folder, devices, kind.environment),
                    start_new_session=True,  # kill ends all of it
                )
            except OSError as e:  # no such file, or none that may be run
                raise UserError(
                    f"engine.python = {python}: {e.strerror}; give the interpreter of the environment that "
                    f"has {kind.package}"
                ) from None

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def ended(self) -> str:
        """How the process ended, with the last line of its log; "" while it runs."""
        code = self._process.poll()
        if code is None:
            return ""
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return f"engine process {self.pid} ended ({how}); {self.log}: {lines[-1] if lines else 'empty'}"

    def port_taken(self) -> bool:
        """Whether the process ended because a port was in use that it was to listen on."""
        if self._process.poll() is None:
            return False
        with open(self.log, "rb") as log:
            log.seek(self._from)
            return bool(_PORT_TAKEN.search(log.read().decode(errors="replace")))

    def kill(self) -> None:
        """End it and what it started, which a process that died by itself may have left behind."""
        if not self._killed:
            self._killed = True  # once: later its number may be another's
            unlink_segments(self._process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()


def environment(folder: Path, devices: Sequence[int], own: Mapping[str, str]) -> dict[str, str]:
    """The trainer's environment without its launcher, and with the engine's own variables."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith((*_MPI, *_LAUNCHER))}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    seen = [visible[i] if i < len(visible) and visible[i] else str(i) for i in devices]
    path = [str(folder / "code"), *filter(None, [kept.get("PYTHONPATH")])]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(path),
        "CUDA_VISIBLE_DEVICES": ",".join(seen),
        **{name: value.format(folder=folder) for name, value in own.items()},
    }
