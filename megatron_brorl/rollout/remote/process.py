"""An engine process: its private folder, its socket, how it starts, how it is kept alive and how it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import zmq

import megatron_brorl
from megatron_brorl.config.schema import EngineConfig
from megatron_brorl.errors import UserError
from megatron_brorl.rollout.registry import ENGINES
from megatron_brorl.rollout.remote.protocol import Capabilities, EngineOptions, Message, decode, encode
from megatron_brorl.rollout.remote.weights_send import HostWeights
from megatron_brorl.signals import LAUNCHER

PREFIX = "brorl-engine-"
_POLL_S = 0.2
_SILENT_S = 1.5  # without a heartbeat, after which the engine is greeted again: a new one needs it
# Workers of an engine would take themselves for ranks of the trainer's launcher.
_MPI = ("PMI_", "PMIX_", "MPI_", "OMPI_", "SLURM_")
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", LAUNCHER, "OMP_NUM_THREADS")
# Names that Python's multiprocessing gives to shared memory.
_SHARED = re.compile(r"/dev/shm/psm_\w+")


class EngineError(RuntimeError):
    """The engine process is gone, silent, or reports a failure."""


def make_folder(parent: str) -> Path:
    """Make a private folder in memory for one engine, and remove those of trainers that are gone.

    Raises UserError where `parent` (engine.shared_memory) cannot be written.
    """
    where = Path(parent)
    with contextlib.suppress(OSError):
        for old in where.glob(f"{PREFIX}*"):
            if not Path("/proc", old.name.removeprefix(PREFIX).partition("-")[0]).exists():
                shutil.rmtree(old, ignore_errors=True)

    try:
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=where))
        # This folder on the engine's import path holds only this package, so that the engine uses its own torch.
        (folder / "code").mkdir()
        (folder / "code" / "megatron_brorl").symlink_to(Path(megatron_brorl.__file__).parent.resolve())
    except OSError as e:
        message = f"engine.shared_memory = {parent}: cannot be written: {e.strerror}; name another folder"
        raise UserError(message) from None
    return folder


def address(folder: Path) -> str:
    """Return the address of the socket of the engine with this folder."""
    return f"ipc://{folder}/socket"


def environment(folder: Path, devices: Sequence[int], own: Mapping[str, str]) -> dict[str, str]:
    """Return the trainer's environment without its launcher's variables, and with the engine's own."""
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


def unlink_shared_memory(group: int) -> None:
    """Unlink the shared memory of a process group that is about to be killed, because it cannot do so itself."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # The process ended meanwhile, or belongs to another user.
            if os.getpgid(int(process.name)) == group:
                for path in _SHARED.findall((process / "maps").read_text()):
                    Path(path).unlink(missing_ok=True)


class Connection:
    """One end of the socket to an engine process, which may die and come back at any time; for one thread at a time."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.pid = 0  # identifies the process that was heard last; 0 = none yet
        self.version = -1  # of its weights
        self.capabilities: Capabilities | None = None
        self.heard = time.monotonic()
        self._greeted = 0.0
        self._socket = self._connect()

    def _connect(self) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM):
            socket.setsockopt(option, 0)
        socket.connect(self.address)
        return socket

    def reconnect(self) -> None:
        """Connect to a new process, and drop the state of the old one and the messages still queued for it."""
        self._socket.close()
        self._socket = self._connect()
        self.pid = 0
        self.version = -1
        self._greeted = 0.0
        self.heard = time.monotonic()

    def send(self, message: Message) -> None:
        """Queue a message; only an answer shows that it arrived."""
        self._socket.send_multipart(encode(message))

    def say_hello(self) -> None:
        """Say hello to the process, which answers with its capabilities and state."""
        self._greeted = time.monotonic()
        self.send(Message("hello"))

    def poll(self, seconds: float) -> list[Message]:
        """Return the messages that have arrived, after waiting at most `seconds` for the first one.

        Heartbeats and hellos are not returned; they update the state of this link. Raises ProtocolError.
        """
        now = time.monotonic()
        if now - max(self.heard, self._greeted) > _SILENT_S or not self._greeted:
            self.say_hello()

        found = []
        if self._socket.poll(int(seconds * 1000)):
            while self._socket.poll(0):
                message = decode(self._socket.recv_multipart())
                self.heard = time.monotonic()
                if message.kind == "heartbeat":
                    self.pid = message.fields["pid"]
                    self.version = message.fields["version"]
                elif message.kind == "hello":
                    self.capabilities = Capabilities(**message.fields)
                else:
                    found.append(message)
        return found

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class EngineProcess:
    """A running engine process, which ends with this one."""

    def __init__(self, python: str, folder: Path, options: EngineOptions, devices: Sequence[int], log: Path) -> None:
        """python: interpreter of the engine's environment. devices: the engine's CUDA devices. log: file that its
        output is appended to. Raises UserError where the interpreter does not start."""
        kind = ENGINES[options.engine]
        self.log = log
        self._killed = False

        # A killed process leaves its socket behind.
        (folder / "socket").unlink(missing_ok=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [python, "-m", "megatron_brorl.rollout.remote.server", address(folder)]
        with open(log, "ab") as output:
            try:
                self._process = subprocess.Popen(
                    [*command, json.dumps(dataclasses.asdict(options))],
                    stdin=subprocess.PIPE,  # Never written to. It closes when this process ends, and the engine ends.
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment(folder, devices, kind.environment),
                    start_new_session=True,  # so that `kill` ends the engine's children too
                )
            except OSError as e:
                raise UserError(
                    f"engine.python = {python}: {e.strerror}; give the interpreter of the environment that has "
                    f"{kind.package}"
                ) from None

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def ended(self) -> str:
        """Return how the process ended, with the last line of its log; "" while it runs."""
        code = self._process.poll()
        if code is None:
            return ""
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return f"engine process {self.pid} ended ({how}); {self.log}: {lines[-1] if lines else 'empty'}"

    def kill(self) -> None:
        """End it and its children, which may outlive it."""
        if not self._killed:
            self._killed = True  # Once: its number may belong to another process later.
            unlink_shared_memory(self._process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()


class Supervisor:
    """Keeps an engine process alive with the weights in use, for the first of the ranks that share the engine."""

    def __init__(
        self, settings: EngineConfig, options: EngineOptions, folder: Path, devices: Sequence[int], log: Path
    ) -> None:
        """Start the process and wait until it answers. Raises UserError where it does not come up."""
        self.settings = settings
        self.options = options
        self.folder = folder
        self.devices = devices
        self.log = log
        self.weights: HostWeights | None = None  # the weights in use
        self.restarts = 0
        self.failure = ""  # why the engine was given up; "" before that
        self.lock = threading.RLock()
        self._closing = threading.Event()
        self._asleep = False

        # The watch begins when the process is up: then those that wait for it hear of its end in time.
        self._link = Connection(address(folder))
        self._process = self._start()
        try:
            self._wait()
        except EngineError as e:
            self._process.kill()
            raise UserError(f"{self.options.key}: {e}") from None
        self._thread = threading.Thread(target=self._watch, name="engine supervisor", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Number of the engine process."""
        return self._process.pid

    def update(self, weights: HostWeights) -> None:
        """Send these weights to the engine and delete the file of the previous ones.

        A process that dies or refuses them is started again, and everything is sent once more. Raises EngineError if
        that fails too; the previous weights then stay in use.
        """
        with self.lock:
            try:
                self._wake()
                self._push(weights)
            except EngineError as e:
                self._restart(str(e), weights)
            old = self.weights
            self.weights = weights
            if old:
                old.delete()

    def restart(self, why: str) -> None:
        """End the process and start it again with the weights in use. Raises EngineError."""
        with self.lock:
            self._restart(why, self.weights)

    def sleep(self) -> None:
        """Give the engine's memory back, and forget the weights in use."""
        with self.lock:
            if self._asleep:
                return
            try:
                self._ask(Message("sleep"))
            except EngineError as e:
                _say(f"{e}; it is ended, and another one started when it is needed")
                self._process.kill()  # This gives its memory back too.
            self._asleep = True
            if self.weights:
                self.weights.delete()
                self.weights = None

    def wake(self) -> None:
        """Take the memory again. Raises EngineError where no engine comes up any more."""
        with self.lock:
            try:
                self._wake()
            except EngineError as e:
                self._restart(str(e), None)

    def close(self) -> None:
        """End the process, and the watch over it."""
        self._closing.set()
        with self.lock:
            self._process.kill()
            self._link.close()

    def _start(self) -> EngineProcess:
        return EngineProcess(self.settings.python or sys.executable, self.folder, self.options, self.devices, self.log)

    def _wait(self) -> None:
        """Wait until the process answers."""
        self._link.reconnect()
        deadline = time.monotonic() + self.settings.start_timeout_s
        while not self._link.pid or self._link.capabilities is None:
            self._link.poll(_POLL_S)
            ended = self._process.ended()
            if ended:
                raise EngineError(ended)
            if time.monotonic() > deadline:
                raise EngineError(
                    f"engine process {self.pid} did not answer within engine.start_timeout_s = "
                    f"{self.settings.start_timeout_s:g} s; see {self.log}"
                )

    def _watch(self) -> None:
        while not self._closing.wait(_POLL_S):
            with self.lock:
                if self._closing.is_set() or self.failure:
                    return
                try:
                    self._link.poll(0)
                    why = self._problem()
                    # The memory of a sleeping engine is in use by others: `wake` starts it again.
                    if why and not self._asleep:
                        self._restart(why, self.weights)
                except EngineError as e:
                    self.failure = str(e)

    def _problem(self) -> str:
        """Return why the process counts as failed, or "" if it is healthy."""
        ended = self._process.ended()
        if ended:
            return ended
        silent = time.monotonic() - self._link.heard
        too_long = silent > self.settings.heartbeat_timeout_s
        return f"engine process {self.pid} is silent for {silent:.0f} s" if too_long else ""

    def _restart(self, why: str, weights: HostWeights | None) -> None:
        while True:
            self.restarts += 1
            if self.restarts > self.settings.max_restarts:
                self.failure = f"{why}; given up after engine.max_restarts = {self.settings.max_restarts}"
                raise EngineError(self.failure)
            holding = f"with the weights of version {weights.version}" if weights else "without weights"
            _say(f"{why}; starting it again {holding}")
            self._process.kill()
            self._process = self._start()
            try:
                self._wait()
                if weights:
                    self._push(weights)
                self._asleep = False
                return
            except EngineError as e:
                why = str(e)

    def _wake(self) -> None:
        if self._asleep:
            self._ask(Message("wake"))
            self._asleep = False

    def _push(self, weights: HostWeights) -> None:
        self._ask(Message("begin"))
        for records in weights.buckets():
            self._ask(Message("load", {"bucket": {"path": str(weights.path), "records": records}}))
        self._ask(Message("finish", {"names": [record.name for record in weights.records], "version": weights.version}))

    def _ask(self, message: Message) -> None:
        """Send a message and wait for the answer "done". Raises EngineError.

        A process keeps sending heartbeats while its worker hangs, so the wait for the answer has its own time limit.
        """
        if self.failure:
            raise EngineError(self.failure)
        self._link.send(message)
        limit = self.settings.heartbeat_timeout_s
        deadline = time.monotonic() + limit
        while True:
            for answer in self._link.poll(_POLL_S):
                if answer.kind == "error":
                    raise EngineError(f"engine process {self.pid}: {answer.fields['what']}")
                if answer.kind == "done":
                    return
            why = self._problem()
            if not why and time.monotonic() > deadline:
                key = "engine.heartbeat_timeout_s"
                why = f"engine process {self.pid} has not done '{message.kind}' after {limit:g} s ({key})"
            if why:
                raise EngineError(why)


def _say(what: str) -> None:
    with contextlib.suppress(OSError):  # The pipe's reader is gone.
        print(f"brorl: {what}", file=sys.stderr, flush=True)
