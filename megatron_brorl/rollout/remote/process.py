"""An engine process on the trainer's side: its private folder, socket, start, supervision and end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
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
from megatron_brorl.errors import UserError, print_error
from megatron_brorl.rollout.registry import ENGINES, HEARTBEAT_TIMEOUT_S, START_TIMEOUT_S
from megatron_brorl.rollout.remote.protocol import Capabilities, EngineOptions, Message, decode, encode
from megatron_brorl.rollout.remote.weights_in_trainer import HostWeights
from megatron_brorl.signals import LAUNCHER

PREFIX = "brorl-engine-"
MAX_RESTARTS = 3  # in a row, without a completed call, before the run ends
_POLL_S = 0.2  # seconds per wait for messages
_SILENT_S = 1.5  # say hello again after this silence, because a restarted process does not know this client
# Variables to remove, because with them an engine's workers would act as ranks of the trainer's launcher.
_MPI = ("PMI_", "PMIX_", "MPI_", "OMPI_", "SLURM_")
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", LAUNCHER, "OMP_NUM_THREADS")
# Settings of CUDA for the trainer. vLLM refuses to sleep with expandable segments.
_CUDA = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS")


class EngineError(RuntimeError):
    """The engine process has ended, is silent, or reports a failure."""


def make_folder(parent: str) -> Path:
    """Create a private folder in memory for one engine, and remove the folders of dead trainers.

    Raises UserError if `parent` (engine.shared_memory) is not writable.
    """
    root = Path(parent)
    with contextlib.suppress(OSError):
        for old in root.glob(f"{PREFIX}*"):
            trainer_pid = old.name.removeprefix(PREFIX).partition("-")[0]
            if not Path("/proc", trainer_pid).exists():
                shutil.rmtree(old, ignore_errors=True)

    try:
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=root))
        # The engine's import path gets a folder with only this package, so that the engine uses its own torch.
        (folder / "code").mkdir()
        (folder / "code" / "megatron_brorl").symlink_to(Path(megatron_brorl.__file__).parent.resolve())
    except OSError as e:
        message = f"engine.shared_memory = {parent}: cannot be written: {e.strerror}; name another folder"
        raise UserError(message) from None
    return folder


def address(folder: Path) -> str:
    """Return the socket address of the engine with this folder."""
    return f"ipc://{folder}/socket"


def environment(folder: Path, devices: Sequence[int], own: Mapping[str, str]) -> dict[str, str]:
    """Return the engine's environment: the trainer's without the variables of its launcher and CUDA, plus `own`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith((*_MPI, *_LAUNCHER, *_CUDA))}
    # `devices` are indices into CUDA_VISIBLE_DEVICES if it is set.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    device_names = [visible[i] if i < len(visible) and visible[i] else str(i) for i in devices]
    path = [str(folder / "code"), *filter(None, [inherited.get("PYTHONPATH")])]
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join(path),
        "CUDA_VISIBLE_DEVICES": ",".join(device_names),
        **{name: value.format(folder=folder) for name, value in own.items()},
    }


def kill_group(group: int) -> None:
    """Kill all processes of a group except this one and the resource trackers of Python's multiprocessing.

    A tracker ends when all processes that use it have ended. It then unlinks the shared memory that they left.
    """
    killed: set[int] = set()
    # Look again, because a process may have started another process before it was killed.
    while members := _members(group) - killed:
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= members


def _members(group: int) -> set[int]:
    """Return the processes of a group that kill_group kills."""
    members = set()
    for process in Path("/proc").glob("[0-9]*"):
        pid = int(process.name)
        with contextlib.suppress(OSError):  # The process ended meanwhile, or belongs to another user.
            if os.getpgid(pid) == group and b"resource_tracker" not in (process / "cmdline").read_bytes():
                members.add(pid)
    return members - {os.getpid()}


class Connection:
    """The trainer's end of the socket to an engine process, which may restart at any time. Not thread-safe."""

    def __init__(self, address: str) -> None:
        self.pid = 0  # of the process that sent the last heartbeat; 0 = none yet
        self.version = -1  # version of its weights
        self.capabilities: Capabilities | None = None
        self.last_heard = time.monotonic()
        self._last_hello = 0.0
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)  # Drop unsent messages at the end; queue any number before.
        self._socket.connect(address)

    def send(self, message: Message) -> None:
        """Queue a message. Only an answer confirms that it arrived."""
        self._socket.send_multipart(encode(message))

    def say_hello(self) -> None:
        """Ask the process for its capabilities and state, and for heartbeats."""
        self._last_hello = time.monotonic()
        self.send(Message("hello"))

    def poll(self, seconds: float) -> list[Message]:
        """Return all messages that have arrived, waiting at most `seconds` for the first one.

        Heartbeats and hellos only update the state of this connection. Raises ProtocolError.
        """
        now = time.monotonic()
        if now - max(self.last_heard, self._last_hello) > _SILENT_S or not self._last_hello:
            self.say_hello()

        messages = []
        if self._socket.poll(int(seconds * 1000)):
            while self._socket.poll(0):
                message = decode(self._socket.recv_multipart())
                self.last_heard = time.monotonic()
                if message.kind == "heartbeat":
                    self.pid = message.fields["pid"]
                    self.version = message.fields["version"]
                elif message.kind == "hello":
                    self.capabilities = Capabilities(**message.fields)
                else:
                    messages.append(message)
        return messages

    def close(self) -> None:
        self._socket.close()


class EngineProcess:
    """A running engine process, which ends when this process ends."""

    def __init__(self, python: str, folder: Path, options: EngineOptions, devices: Sequence[int], log: Path) -> None:
        """Start the process.

        python: interpreter of the engine's environment. devices: the engine's CUDA devices. log: file to which its
        output is appended. Raises UserError if the interpreter does not start.
        """
        kind = ENGINES[options.engine]
        self.log = log
        self._killed = False

        # A killed process leaves its socket file behind.
        (folder / "socket").unlink(missing_ok=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [python, "-m", "megatron_brorl.rollout.remote.server", address(folder)]
        with open(log, "ab") as output:
            self._log_start = output.tell()  # earlier processes have written the part before
            try:
                self._process = subprocess.Popen(
                    [*command, json.dumps(dataclasses.asdict(options))],
                    stdin=subprocess.PIPE,  # Never written. It closes when this process ends, which ends the engine.
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment(folder, devices, kind.environment),
                    start_new_session=True,  # so that kill() also ends the engine's children
                )
            except OSError as e:
                raise UserError(
                    f"engine.python = {python}: {e.strerror}; give the interpreter of the environment that has "
                    f"{kind.package}"
                ) from None
        self.pid = self._process.pid

    def ended(self) -> str:
        """Return how the process ended and the last line of its log, or "" if it is running."""
        code = self._process.poll()
        if code is None:
            return ""
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        lines = self.log.read_bytes()[self._log_start :].decode(errors="replace").strip().splitlines()
        return f"engine process {self.pid} ended ({how}); {self.log}: {lines[-1] if lines else 'empty'}"

    def kill(self) -> None:
        """Kill the process and its children, which may outlive it."""
        if not self._killed:
            self._killed = True  # Kill only once, because the pid may be reused.
            kill_group(self._process.pid)
            self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()


@dataclasses.dataclass(eq=False)
class Supervisor:
    """Keeps an engine process running with the current weights. Only the leader of the engine has a supervisor.

    The constructor waits until the process answers. Raises UserError if it does not start.
    """

    settings: EngineConfig
    options: EngineOptions
    folder: Path
    devices: Sequence[int]
    log: Path

    def __post_init__(self) -> None:
        self.weights: HostWeights | None = None  # the current weights
        self.restarts = 0
        self.failure = ""  # why the supervisor has given up; "" if it has not
        self.lock = threading.RLock()
        self._closing = threading.Event()
        self._asleep = False

        # Start the supervising thread when the process is ready, so that a failed start is an error and not a restart.
        self._link = Connection(address(self.folder))
        try:
            self._start()
        except EngineError as e:
            self._process.kill()
            raise UserError(f"{self.options.key}: {e}") from None
        threading.Thread(target=self._watch, name="engine supervisor", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def update(self, weights: HostWeights) -> None:
        """Send these weights to the engine.

        If the process dies or refuses them, restart it and send everything again. Raises EngineError if that fails too;
        the previous weights then stay current.
        """
        with self.lock:
            try:
                self._wake()
                self._push(weights)
            except EngineError as e:
                self._restart(str(e), weights)
            self.weights = weights

    def restart(self, why: str) -> None:
        """Restart the process with the current weights. Raises EngineError."""
        with self.lock:
            self._restart(why, self.weights)

    def kill(self, why: str) -> None:
        """Kill the process. The supervising thread starts it again, so this method returns at once."""
        with self.lock:
            print_error(f"brorl: {why}; killed")
            self._process.kill()

    def sleep(self) -> None:
        """Free the engine's memory. The next update may overwrite the current weights."""
        with self.lock:
            if self._asleep:
                return
            try:
                self._ask(Message("sleep"))
            except EngineError as e:
                print_error(f"brorl: {e}; killed, and started again when it is needed")
                self._process.kill()  # This also frees its memory.
            self._asleep = True
            self.weights = None

    def wake(self) -> None:
        """Allocate the engine's memory again. Raises EngineError if the engine does not start again."""
        with self.lock:
            try:
                self._wake()
            except EngineError as e:
                self._restart(str(e), weights=None)

    def close(self) -> None:
        """Kill the process and stop supervising it."""
        self._closing.set()
        with self.lock:
            self._process.kill()
            self._link.close()

    def _start(self) -> None:
        """Start a process and wait until it answers. Raises EngineError if it ends or takes too long."""
        python = self.settings.python or sys.executable
        self._process = EngineProcess(python, self.folder, self.options, self.devices, self.log)
        # A new connection drops the state of the old process and the messages queued for it.
        self._link.close()
        self._link = Connection(address(self.folder))
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._link.pid or self._link.capabilities is None:
            self._link.poll(_POLL_S)
            if ended := self._process.ended():
                raise EngineError(ended)
            if time.monotonic() > deadline:
                raise EngineError(
                    f"engine process {self.pid} did not answer within {START_TIMEOUT_S:g} s; see {self.log}"
                )

    def _watch(self) -> None:
        while not self._closing.wait(_POLL_S):
            with self.lock:
                if self._closing.is_set() or self.failure:
                    return
                try:
                    self._link.poll(seconds=0)
                    why = self._problem()
                    # The trainer uses the memory of a sleeping engine, so wake() restarts a dead engine.
                    if why and not self._asleep:
                        self._restart(why, self.weights)
                except EngineError as e:
                    self.failure = str(e)

    def _problem(self) -> str:
        """Return why the process counts as failed, or "" if it is healthy."""
        if ended := self._process.ended():
            return ended
        silent_s = time.monotonic() - self._link.last_heard
        return f"engine process {self.pid} is silent for {silent_s:.0f} s" if silent_s > HEARTBEAT_TIMEOUT_S else ""

    def _restart(self, why: str, weights: HostWeights | None) -> None:
        while True:
            self.restarts += 1
            if self.restarts > MAX_RESTARTS:
                self.failure = f"{why}; gave up after {MAX_RESTARTS} restarts without a completed call"
                raise EngineError(self.failure)
            with_weights = f"with the weights of version {weights.version}" if weights else "without weights"
            print_error(f"brorl: {why}; restarting it {with_weights}")
            self._process.kill()
            try:
                self._start()
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
        self._ask(Message("finish", {"version": weights.version}))

    def _ask(self, message: Message) -> None:
        """Send a message and wait for the answer "done". Raises EngineError.

        The wait has its own time limit, because a process keeps sending heartbeats while its worker hangs.
        """
        if self.failure:
            raise EngineError(self.failure)
        self._link.send(message)
        deadline = time.monotonic() + HEARTBEAT_TIMEOUT_S
        while True:
            for answer in self._link.poll(_POLL_S):
                if answer.kind == "error":
                    raise EngineError(f"engine process {self.pid}: {answer.fields['what']}")
                if answer.kind == "done":
                    return
            why = self._problem()
            if not why and time.monotonic() > deadline:
                why = f"engine process {self.pid} did not finish '{message.kind}' within {HEARTBEAT_TIMEOUT_S:g} s"
            if why:
                raise EngineError(why)
