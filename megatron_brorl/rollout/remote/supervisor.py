"""Keeps an engine process alive with the weights in use: starts it, listens to it, starts it again."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_brorl.config.schema import EngineConfig
from megatron_brorl.errors import UserError
from megatron_brorl.rollout.remote.link import Link
from megatron_brorl.rollout.remote.messages import Message
from megatron_brorl.rollout.remote.options import Capabilities, EngineOptions, WorkerBucket
from megatron_brorl.rollout.remote.process import EngineProcess, address
from megatron_brorl.rollout.remote.shared_weights import HostWeights

_POLL_S = 0.2


class EngineError(RuntimeError):
    """The engine process is gone, silent, or says that it failed; in words."""


class Supervisor:
    """Of the leader among the ranks that share an engine."""

    def __init__(
        self, settings: EngineConfig, options: EngineOptions, folder: Path, devices: Sequence[int], log: Path
    ) -> None:
        """Starts the process and waits until it can be asked. Raises UserError where it does not come up."""
        self.settings, self.options, self.folder, self.devices, self.log = settings, options, folder, devices, log
        self.weights: HostWeights | None = None  # the weights in use
        self.restarts = 0
        self.failure = ""  # why there is no engine any more
        self.lock = threading.RLock()
        self._closing = threading.Event()
        self._asleep = False

        # Whoever waits for the engine hears in time why there is none; the watch begins when it is up.
        self._link = Link(address(folder))
        self._process = self._start()
        self.capabilities = self._first()
        self._thread = threading.Thread(target=self._watch, name="engine supervisor", daemon=True)
        self._thread.start()

    def _first(self) -> Capabilities:
        """Of the first process that comes up. A port that another process took meanwhile is no reason to give up, for
        the next start finds others; whatever else goes wrong would go wrong again."""
        for tries_left in range(self.settings.max_restarts, -1, -1):
            try:
                return self._wait()
            except EngineError as e:
                again = tries_left and self._process.port_taken()
                self._process.kill()
                if not again:
                    raise UserError(f"{self.options.key}: {e}") from None
                self._say(f"{e}; starting it again on other ports")
                self._process = self._start()
        raise AssertionError("the last try returns or raises")

    def _say(self, what: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads the pipe any more
            print(f"brorl: {what}", file=sys.stderr, flush=True)

    @property
    def pid(self) -> int:
        """Of the engine process."""
        return self._process.pid

    def update(self, weights: HostWeights, loaded: Sequence[str] | None = None) -> None:
        """Make these the weights in use; what was in use before is deleted.

        loaded: names that the engine was sent already, by `send`; else all are sent. Where the engine dies or refuses
        on the way it is started again and sent everything once more. Raises EngineError where that fails too; the
        weights in use are then those from before.
        """
        with self.lock:
            try:
                self._wake()
                if loaded is None:
                    self._push(weights)
                else:
                    self._ask(Message("finish", {"names": list(loaded), "version": weights.version}))
            except EngineError as e:
                self._restart(str(e), weights)
            old, self.weights = self.weights, weights
            if old:
                old.delete()

    def begin(self) -> bool:
        """Say that `send` follows: from here to the end of `update` the engine has no weights to generate with.

        Returns whether the engine heard it.
        """
        with self.lock:
            try:
                self._wake()
                self._ask(Message("begin"))
            except EngineError:
                return False
            return True

    def send(self, bucket: WorkerBucket) -> None:
        """Let the workers load a bucket. Raises EngineError."""
        with self.lock:
            self._ask(Message("load", {"bucket": bucket}))

    def restart(self, why: str) -> None:
        """End the process and start it again with the weights in use."""
        with self.lock:
            self._restart(why, self.weights)

    def sleep(self) -> None:
        """Give the engine's memory back; the weights in use are forgotten."""
        with self.lock:
            if self._asleep:
                return
            try:
                self._ask(Message("sleep"))
            except EngineError as e:
                self._say(f"{e}; it is ended, and another one started when it is needed")
                self._process.kill()  # which gives its memory back too
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

    def _watch(self) -> None:
        while not self._closing.wait(_POLL_S):
            with self.lock:
                if self._closing.is_set() or self.failure:
                    return
                try:
                    self._link.poll(0)
                    why = self._problem()
                    if why and not self._asleep:  # else its memory is in use by others: `wake` starts it again
                        self._restart(why, self.weights)
                except EngineError as e:
                    self.failure = str(e)

    def _problem(self) -> str:
        """What is wrong with the process, or ""."""
        ended = self._process.ended()
        if ended:
            return ended
        silent = time.monotonic() - self._link.heard
        too_long = silent > self.settings.heartbeat_timeout_s
        return f"engine process {self.pid} is silent for {silent:.0f} s" if too_long else ""

    def _start(self) -> EngineProcess:
        return EngineProcess(self.settings.python or sys.executable, self.folder, self.options, self.devices, self.log)

    def _wait(self) -> Capabilities:
        """Until the process answers, which takes as long as an engine takes to start."""
        self._link.renew()
        deadline = time.monotonic() + self.settings.start_timeout_s
        while not self._link.boot or self._link.capabilities is None:
            self._link.poll(_POLL_S)
            ended = self._process.ended()
            if ended:
                raise EngineError(ended)
            if time.monotonic() > deadline:
                raise EngineError(
                    f"engine process {self.pid} did not answer within engine.start_timeout_s = "
                    f"{self.settings.start_timeout_s:g} s; see {self.log}"
                )
        return self._link.capabilities

    def _restart(self, why: str, weights: HostWeights | None) -> None:
        while True:
            self.restarts += 1
            if self.restarts > self.settings.max_restarts:
                limit = f"engine.max_restarts = {self.settings.max_restarts}"
                self.failure = f"{why}; given up after {limit}"
                raise EngineError(self.failure)
            holding = f"with the weights of version {weights.version}" if weights else "without weights"
            self._say(f"{why}; starting it again {holding}")
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
        """Send and wait for "done". Raises EngineError.

        A process whose worker stands still sends its heartbeats for ever: a call ends after that time in any case.
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
