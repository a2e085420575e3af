"""An engine in another process behind the engine protocol: supervised, and never asked while its weights are mixed.

Ranks of one node that share an engine each have one of these; the first leads: it starts the process, hands it the
weights and starts it again when it dies. What is unfinished then is asked again, with the same seeds. The weights in
use also lie in shared memory, so that none of this needs the trainer's other ranks.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_brorl.config.schema import EngineConfig
from megatron_brorl.errors import UserError
from megatron_brorl.ops.philox import stream_key
from megatron_brorl.parallel import device
from megatron_brorl.rollout.engine import KvUsage, Request, Sampling, Supply, Watch
from megatron_brorl.rollout.receive import UpdateRefused
from megatron_brorl.rollout.registry import ENGINES
from megatron_brorl.rollout.remote.cuda_ipc import IpcSender, own_device
from megatron_brorl.rollout.remote.fp8_blocks import quantized
from megatron_brorl.rollout.remote.link import Link
from megatron_brorl.rollout.remote.log_probs import log_prob_limits
from megatron_brorl.rollout.remote.messages import Message
from megatron_brorl.rollout.remote.options import Capabilities, EngineOptions
from megatron_brorl.rollout.remote.pending import PendingRollout, PendingRollouts, generate_message
from megatron_brorl.rollout.remote.process import address
from megatron_brorl.rollout.remote.shared_weights import HostWeights
from megatron_brorl.rollout.remote.staging import Node, Update, stage
from megatron_brorl.rollout.remote.supervisor import EngineError, Supervisor
from megatron_brorl.types import Rollout

_POLL_S = 0.05
_STOP_S = 10.0  # that an engine may take to give up what it was told to stop


class RemoteEngine:
    """One rank's share of an engine; see rollout.engine for the verbs."""

    def __init__(
        self,
        settings: EngineConfig,
        options: EngineOptions,
        names: dict[str, tuple[int, ...]],
        folder: Path,
        devices: Sequence[int] | None,
        log: Path,
        node: Node | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        meet: Callable[[], object] = lambda: None,
    ) -> None:
        """names: every Hugging Face tensor of the model with its shape. folder: of process.make_folder, the same for
        all ranks that share the engine. devices: the engine's CUDA devices; None on all of these ranks but the first.
        log: file for the process's output. node: the ranks that write updates together; None: the leader alone.
        decode: tokens -> text, needed for stop strings.
        meet: a barrier of the ranks that share the engine.

        Raises UserError where the process does not come up, or cannot do what the configuration asks for.
        """
        self.settings, self.options, self.names, self.folder = settings, options, names, folder
        self.decode = decode
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        self.version = -1
        self.leads = devices is not None
        self.supervisor: Supervisor | None = None
        self.node = node or (Node.alone(folder) if self.leads else None)
        self._meet = meet
        self._calls = self._stages = 0
        self._open: set[int] = set()  # calls of this generation that are not over
        self._link = Link(address(folder))

        # Whatever fails from here on, no process and no folder may stay behind.
        try:
            if devices is not None:
                self.supervisor = Supervisor(settings, options, folder, devices, log)
            self.capabilities = self._wait_for_capabilities()
            self.ipc = self.supervisor is not None and self._by_ipc()
        except UserError:
            self.close()
            raise

    @property
    def if_repeating(self) -> str:
        """See RolloutEngine."""
        c = self.capabilities
        return f'{c.engine}; {c.if_repeating}, or start anew with rollout.engine = "torch"'

    @property
    def rows(self) -> int:
        """Rollouts of this rank that are asked for at once where others could sample them: its share of what the engine
        computes at a time, with room for half of the longest response each, so that none waits inside it."""
        c = self.capabilities
        return max(1, min(c.rows, 2 * c.kv_tokens // self.options.context) // self.settings.tensor)

    def _wait_for_capabilities(self) -> Capabilities:
        deadline = time.monotonic() + self.settings.start_timeout_s
        while self._link.capabilities is None:
            self._link.poll(_POLL_S)
            if time.monotonic() > deadline:
                raise UserError(
                    f"the engine of another rank did not come up within engine.start_timeout_s = "
                    f"{self.settings.start_timeout_s:g} s; its rank says why"
                )
        return self._link.capabilities

    def _by_ipc(self) -> bool:
        """Whether weights go by CUDA IPC (config key transport)."""
        why = ""
        if not device.on_gpu():
            why = "there is no GPU"
        elif self.settings.tensor > 1:
            why = "engine.tensor is above 1, and a rank reaches its own GPU alone"
        elif self.capabilities.torch != torch.__version__:
            why = f"the engine has torch {self.capabilities.torch}, the trainer {torch.__version__}"
        elif self.capabilities.devices != (own_device(),):
            why = f"the engine runs on {self.capabilities.devices}, this rank on {own_device()}"

        if why and self.settings.transport == "cuda_ipc":
            raise UserError(f'engine.transport = "cuda_ipc": {why}: use "host"')
        return not why and self.settings.transport != "host"

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See RolloutEngine; tensors [any shape]. The ranks of the node take the stream into shared memory and check it
        before an engine hears of it; by CUDA IPC both happen at once, and an engine that was sent a faulty stream is
        started again."""
        # Other ranks have no engine to tell; whether the leader's took it, train.refit asks all ranks.
        if self.supervisor is None:
            self.decline_weights(tensors)
            self.version = version  # generate waits until the engine says that it has this one
            return

        # By CUDA IPC the engine is sent what passes on the way into shared memory.
        sender = None
        if self.ipc:
            sender = IpcSender(self.capabilities.devices[0], self.supervisor.send, self._as_sent)
            tensors = sender.tee(tensors)
            sender.failed = not self.supervisor.begin()  # then all is sent from shared memory below

        # The stream is checked as a whole; until then the weights in use stay in shared memory beside the new ones.
        try:
            weights = self._stage(tensors, version)
        except UpdateRefused as e:
            if sender:  # the engine has a part of them
                self.supervisor.restart(f"weights of version {version} broke off ({e})")
            raise
        assert weights  # of a leader

        # From here on the engine has the new weights, or those from before, but never a mixture.
        try:
            self.supervisor.update(weights, sender.names if sender and not sender.failed else None)
        except EngineError as e:
            weights.delete()  # or every refused update would keep a model's size of memory
            raise UpdateRefused(f"weight update: {e}") from None
        self.version = version

    def decline_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See RolloutEngine; tensors [any shape]."""
        if self.node is None:
            for _ in tensors:  # a collective
                pass
            return
        weights = self._stage(tensors, self.version)
        if weights:
            weights.delete()

    def _as_sent(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """What the engine is sent for a tensor of the stream."""
        tensor = tensor.to(self.dtype)
        in_blocks = self.settings.quantization == "fp8" and ENGINES[self.options.engine].takes_fp8_blocks
        return quantized(name, tensor) if in_blocks else iter([(name, tensor)])

    def _stage(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> HostWeights | None:
        """A complete, checked update in shared memory, where this rank leads an engine; a collective of the node."""
        assert self.node
        self._stages += 1
        key = "engine.shared_memory"
        update = Update(self._stages, version, self.names, self.dtype, self._as_sent, key)
        return stage(tensors, update, self.node, self.folder / f"weights_{self._stages}" if self.leads else None)

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        watch: Watch | None = None,
        supply: Supply | None = None,
    ) -> list[list[Rollout]]:
        """See RolloutEngine. Every rollout is a request of its own with a seed of its own; siblings share their prompt
        in the engine's prefix cache. Rollouts that are cancelled lose what this call added to them, unless the engine
        keeps it (Capabilities.keeps_cut)."""
        if self.version < 0:
            raise RuntimeError("the engine has no weights: call update_weights first")
        self._check(requests, sampling, supply)

        # What it was asked before is over, however that call ended.
        self._open.clear()
        pending = PendingRollouts(sampling, watch, supply, self.rows, self.options.vocab, self.decode)
        pending.add(requests)
        pending.take()

        # Until all have come or the caller cancels: ask whoever can answer, and take the answers as they come.
        asked, rows = 0, pending.rows  # the process that has the rows
        self._link.greet()  # answered with the state: what is known of it here may be old
        while rows and not (watch and watch.cancelled()):
            # No engine will come up any more. Ranks without a supervisor do not know, and end when they are cancelled.
            if self.supervisor and self.supervisor.failure:
                raise UserError(f"{self.options.key}: {self.supervisor.failure}")

            # A process that was started again knows of nothing: it is asked for what is still missing.
            if self._link.boot != asked and self._link.version == self.version:
                self._open.clear()  # what another process was asked for will not come
                asked = self._ask(rows, sampling)

            before = len(rows)
            for message in self._link.poll(_POLL_S):
                if message.fields.get("call") not in self._open:
                    continue  # of a call that was given up
                if message.kind == "stale":  # its weights are others by now: wait for the right ones and ask again
                    asked = 0
                    self._open.clear()
                elif message.kind == "error":
                    raise RuntimeError(f"engine process: {message.fields['what']}")
                elif message.kind == "rollout":
                    pending.answered(message, self.version)
                elif message.kind == "ended":
                    self._open.discard(message.fields["call"])

            # What it says that it has answered and has not come is asked again.
            if asked and rows and not self._open:
                asked = 0

            # Rows that ended make room for others, which the process that has the rest is asked for as well.
            new = pending.take() if len(rows) < before else {}
            if new and asked == self._link.boot:
                self._ask(new, sampling)

        # Everything has come, or the caller has lost patience: what is left is as it was before this call, or has what
        # the engine says that it drew.
        if rows:
            self._stop(pending)
        elif self.supervisor:
            self.supervisor.restarts = 0  # only those in a row count

        if pending.faults:
            told = f"{len(pending.faults)} answers were none, and their rollouts are lost: {pending.faults[0]}"
            print(f"warning: {self.options.key}: {told}", file=sys.stderr, flush=True)
        return pending.result()

    def _ask(self, rows: Mapping[int, PendingRollout], sampling: Sampling) -> int:
        """Ask for these rows by a call of their own; returns the process that was asked."""
        boot = self._link.boot
        self._calls += 1
        self._open.add(self._calls)
        reseed = stream_key("engine", self._calls, *(row.seed for row in rows.values()))
        fields = {"call": self._calls, "version": self.version, "reseed": reseed}
        self._link.send(generate_message(rows, sampling, fields))
        return boot

    def _stop(self, pending: PendingRollouts) -> None:
        """Make the engine give up what it was asked for; one that does not is started again."""
        for call in self._open:
            self._link.send(Message("cancel", {"call": call}))
        deadline = time.monotonic() + _STOP_S
        while self._open and time.monotonic() < deadline:
            for message in self._link.poll(_POLL_S):
                if message.fields.get("call") not in self._open:
                    continue
                if message.kind == "rollout":
                    pending.answered(message, self.version)
                elif message.kind == "ended":
                    self._open.discard(message.fields["call"])
        if not self._open:
            return
        if self.supervisor:
            self.supervisor.restart(f"engine process {self.supervisor.pid} did not stop when told to")

    def kv_usage(self) -> KvUsage | None:
        """See RolloutEngine: it does not tell."""
        return None

    def renew(self, why: str) -> bool:
        """See RolloutEngine. Raises UserError where no engine comes up any more."""
        try:
            if self.supervisor:
                self.supervisor.restart(why)
        except EngineError as e:
            raise UserError(f"{self.options.key}: {e}") from None
        return True

    def sleep(self) -> None:
        """See RolloutEngine. No rank that shares the engine may be generating."""
        self.version = -1
        if self.supervisor:
            self.supervisor.sleep()
        # The engine's workers are on the GPUs of all its ranks. A rank may load its models only when they have let go.
        self.meet()

    def wake(self) -> None:
        """See RolloutEngine. Raises UserError where no engine comes up any more."""
        # The other way round: every rank has offloaded its models before the workers take memory.
        self.meet()
        try:
            if self.supervisor:
                self.supervisor.wake()
        except EngineError as e:
            raise UserError(f"{self.options.key}: {e}") from None

    def meet(self) -> None:
        """See RolloutEngine."""
        self._meet()

    def close(self) -> None:
        """End the process."""
        self._link.close()
        if self.supervisor:
            self.supervisor.close()
        if self.leads:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _check(self, requests: Sequence[Request], sampling: Sampling, supply: Supply | None) -> None:
        longest = max((len(r.prompt.token_ids) for r in requests), default=0)
        longest = max(longest, supply.prompt_tokens if supply else 0)
        if longest + sampling.max_tokens > self.options.context:
            raise UserError(
                f"rollout.max_tokens = {sampling.max_tokens} after a prompt of {longest} tokens exceeds the engine's "
                f"context of {self.options.context}: lower rollout.max_tokens or shorten the prompts"
            )

        c, s = self.capabilities, sampling
        why = log_prob_limits(c.log_probs, s.temperature, s.top_p, s.top_k) if s.log_probs else ""
        if why:
            raise UserError(
                f"rollout.temperature = {s.temperature:g}, rollout.top_p = {s.top_p:g}: {c.engine} {why}: train at "
                "temperature 1 and top_p 1, or with rollout.top_k"
            )
