"""TensorRT-LLM behind the engine protocol: a process of its own, supervised, never asked while its weights are mixed.

Ranks of one node that share an engine (trtllm.tensor of them) each have one of these; the first leads: it starts the
process, hands it the weights and starts it again when it dies. What is unfinished then is asked again, with the same
seeds. The weights in use also lie in shared memory, so that none of this needs the trainer's other ranks.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_brorl.config.schema import TrtLlmConfig
from megatron_brorl.errors import UserError
from megatron_brorl.ops.philox import stream_key
from megatron_brorl.parallel import device
from megatron_brorl.rollout.engine import Request, Sampling, Watch
from megatron_brorl.rollout.receive import UpdateRefused, receive
from megatron_brorl.rollout.remote import shared_weights
from megatron_brorl.rollout.remote.cuda_ipc import IpcSender, own_device
from megatron_brorl.rollout.remote.fp8_blocks import quantized
from megatron_brorl.rollout.remote.link import Link
from megatron_brorl.rollout.remote.messages import Message
from megatron_brorl.rollout.remote.options import Capabilities, EngineOptions, log_prob_limits
from megatron_brorl.rollout.remote.process import address
from megatron_brorl.rollout.remote.shared_weights import HostWeights
from megatron_brorl.rollout.remote.supervisor import EngineError, Supervisor
from megatron_brorl.types import FinishReason, Rollout, RolloutGroup

_LOOK_S = 0.05
_STOP_S = 10.0  # that an engine may take to give up what it was told to stop


@dataclass(frozen=True)
class _Row:
    """A rollout that is asked for."""

    request: int
    ids: tuple[int, ...]  # of the prompt and what was sampled before
    begun: Rollout
    tokens: int  # to be added at most
    seed: int


class TrtLlmEngine:
    """One rank's share of an engine; see rollout.engine for the verbs."""

    def __init__(
        self,
        config: TrtLlmConfig,
        options: EngineOptions,
        names: dict[str, tuple[int, ...]],
        dtype: torch.dtype,
        folder: Path,
        devices: Sequence[int] | None,
        log: Path,
    ) -> None:
        """names: every Hugging Face tensor of the model with its shape. folder: of trtllm_process.make_folder, the same
        for all ranks that share the engine. devices: the engine's CUDA devices; None on all of these ranks but the
        first. log: file for the process's output.

        Raises UserError where the process does not come up, or cannot do what the configuration asks for.
        """
        self.config, self.options, self.names, self.dtype, self.folder = config, options, names, dtype, folder
        self.version = -1
        self.leads = devices is not None
        self.supervisor: Supervisor | None = None
        self._calls = self._stages = 0
        self._link = Link(address(folder))
        try:
            if devices is not None:
                self.supervisor = Supervisor(config, options, folder, devices, log)
            self.capabilities = self._meet()
            self.ipc = self.supervisor is not None and self._by_ipc()
        except UserError:
            self.close()
            raise

    @property
    def if_repeating(self) -> str:
        """See RolloutEngine."""
        c = self.capabilities
        return (
            f"TensorRT-LLM {c.tensorrt_llm} with {c.sampler}; choose another trtllm.sampler, or start anew with "
            'rollout.engine = "torch"'
        )

    def _meet(self) -> Capabilities:
        deadline = time.monotonic() + self.config.start_timeout_s
        while self._link.capabilities is None:
            self._link.poll(_LOOK_S)
            if time.monotonic() > deadline:
                raise UserError(
                    f"the engine of another rank did not come up within trtllm.start_timeout_s = "
                    f"{self.config.start_timeout_s:g} s; its rank says why"
                )
        return self._link.capabilities

    def _by_ipc(self) -> bool:
        """Whether weights go by CUDA IPC (config key trtllm.transport)."""
        why = ""
        if not device.on_gpu():
            why = "there is no GPU"
        elif self.config.tensor > 1:
            why = "trtllm.tensor is above 1, and a rank reaches its own GPU alone"
        elif self.capabilities.torch != torch.__version__:
            why = f"the engine has torch {self.capabilities.torch}, the trainer {torch.__version__}"
        elif self.capabilities.devices != (own_device(),):
            why = f"the engine runs on {self.capabilities.devices}, this rank on {own_device()}"
        if why and self.config.transport == "cuda_ipc":
            raise UserError(f'trtllm.transport = "cuda_ipc": {why}: use "host"')
        return not why and self.config.transport != "host"

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See RolloutEngine. The leader takes the stream into shared memory and checks it before the engine hears of
        it; by CUDA IPC both happen at once, and an engine that was sent a faulty stream is started again."""
        if self.supervisor is None:
            for _ in tensors:  # a collective; whether the leader's engine took it, train.refit asks all ranks
                pass
            self.version = version
            return
        sender = None
        if self.ipc:
            sender = IpcSender(self.capabilities.devices[0], self.supervisor.send, self._form)
            tensors = sender.tee(tensors)
            sender.failed = not self.supervisor.begin()
        try:
            weights = self._stage(tensors, version)
        except UpdateRefused as e:
            if sender:
                self.supervisor.restart(f"weights of version {version} broke off ({e})")
            raise
        try:
            self.supervisor.update(weights, sender.names if sender and not sender.failed else None)
        except EngineError as e:
            weights.delete()
            raise UpdateRefused(f"weight update: {e}") from None
        self.version = version

    def _form(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """What the engine is sent for a tensor of the stream."""
        tensor = tensor.to(self.dtype)
        return quantized(name, tensor) if self.options.quantization == "fp8_block" else iter([(name, tensor)])

    def _stage(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> HostWeights:
        """A complete, checked update in shared memory."""
        staged = receive(tensors, self.names, torch.device("cpu"), self.dtype)
        self._stages += 1
        path = self.folder / f"weights_{self._stages}"
        pairs = (pair for name, tensor in staged.items() for pair in self._form(name, tensor))
        return shared_weights.write(path, pairs, version, shared_weights.room(self.names, self.dtype))

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, watch: Watch | None = None
    ) -> list[RolloutGroup]:
        """See RolloutEngine. Every row is a request of its own with a seed of its own; siblings share their prompt in
        the engine's prefix cache. Rows that are cancelled lose what this call had added to them."""
        if self.version < 0:
            raise RuntimeError("the engine has no weights: call update_weights first")
        self._check(requests, sampling)
        rows = dict(enumerate(_rows(requests, sampling)))
        found: list[list[Rollout]] = [[] for _ in requests]

        def deliver(row: _Row, rollout: Rollout) -> None:
            found[row.request].append(rollout)
            if watch and rollout.finish != "cut":
                watch.finished(row.request, rollout)

        asked = 0  # the process that has the rows
        self._link.greet()
        while rows and not (watch and watch.cancelled()):
            if self.supervisor and self.supervisor.failure:
                raise UserError(f'rollout.engine = "trtllm": {self.supervisor.failure}')
            if self._link.boot != asked and self._link.version == self.version:
                asked = self._ask(rows, sampling)
            for message in self._link.poll(_LOOK_S):
                if message.fields.get("call") != self._calls:
                    continue
                if message.kind == "stale":
                    asked = 0
                elif message.kind == "error":
                    raise RuntimeError(f"engine process: {message.fields['what']}")
                elif message.kind == "row":
                    row = rows.pop(message.fields["number"])
                    deliver(row, self._rollout(row, message, sampling))
        if rows:
            self._stop()
        elif self.supervisor:
            self.supervisor.restarts = 0
        for row in rows.values():
            deliver(row, row.begun)
        return [
            RolloutGroup(r.prompt, tuple(sorted(rollouts, key=lambda x: x.index)), self.version)
            for r, rollouts in zip(requests, found, strict=True)
        ]

    def _ask(self, rows: dict[int, _Row], sampling: Sampling) -> int:
        """Send all rows; returns the process that they were sent to."""
        boot = self._link.boot
        self._calls += 1
        fields = {
            "call": self._calls,
            "version": self.version,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "log_probs": sampling.log_probs,
            "reseed": stream_key("engine", self._calls, *(row.seed for row in rows.values())),
        }
        tensors = {
            "numbers": torch.tensor(list(rows)),
            "lengths": torch.tensor([len(row.ids) for row in rows.values()]),
            "ids": torch.tensor([i for row in rows.values() for i in row.ids], dtype=torch.int64),
            "tokens": torch.tensor([row.tokens for row in rows.values()]),
            "seeds": torch.tensor([row.seed for row in rows.values()]),
        }
        self._link.send(Message("generate", fields, tensors))
        return boot

    def _rollout(self, row: _Row, message: Message, sampling: Sampling) -> Rollout:
        before, ids = row.begun, message.tensors["ids"]
        if not len(ids):
            return before
        log_probs = message.tensors["log_probs"] if sampling.log_probs else torch.full((len(ids),), float("nan"))
        finish: FinishReason = message.fields["finish"]
        if finish == "length" and len(before.token_ids) + len(ids) < sampling.max_tokens:
            finish = "cut"
        spans = before.spans
        if spans and spans[-1][0] == self.version:
            spans = (*spans[:-1], (self.version, spans[-1][1] + len(ids)))
        else:
            spans = (*spans, (self.version, len(ids)))
        tokens = torch.cat((before.token_ids, ids))
        return Rollout(before.index, tokens, torch.cat((before.log_probs, log_probs)), finish, spans)

    def _stop(self) -> None:
        """Make the engine give up this call; one that does not is started again."""
        self._link.send(Message("cancel", {"call": self._calls}))
        deadline = time.monotonic() + _STOP_S
        while time.monotonic() < deadline:
            for message in self._link.poll(_LOOK_S):
                if message.kind == "ended" and message.fields["call"] == self._calls:
                    return
        if self.supervisor:
            self.supervisor.restart(f"engine process {self.supervisor.pid} did not stop when told to")

    def sleep(self) -> None:
        """See RolloutEngine. No rank that shares the engine may be generating."""
        self.version = -1
        if self.supervisor:
            self.supervisor.sleep()

    def wake(self) -> None:
        """See RolloutEngine. Raises UserError where no engine comes up any more."""
        try:
            if self.supervisor:
                self.supervisor.wake()
        except EngineError as e:
            raise UserError(f'rollout.engine = "trtllm": {e}') from None

    def close(self) -> None:
        """End the process."""
        self._link.close()
        if self.supervisor:
            self.supervisor.close()
        if self.leads:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _check(self, requests: Sequence[Request], sampling: Sampling) -> None:
        longest = max((len(r.prompt.token_ids) for r in requests), default=0)
        if longest + sampling.max_tokens > self.options.context:
            raise UserError(
                f"rollout.max_tokens = {sampling.max_tokens} after a prompt of {longest} tokens exceeds the engine's "
                f"context of {self.options.context}: lower rollout.max_tokens or shorten the prompts"
            )
        c = self.capabilities
        why = log_prob_limits(c, sampling.temperature, sampling.top_p, sampling.top_k) if sampling.log_probs else ""
        if why:
            raise UserError(
                f"rollout.temperature = {sampling.temperature:g}, rollout.top_p = {sampling.top_p:g}: TensorRT-LLM "
                f"{c.tensorrt_llm} with {c.sampler} {why}: train at temperature 1 and top_p 1, or with rollout.top_k"
            )


def _rows(requests: Sequence[Request], sampling: Sampling) -> Iterator[_Row]:
    nothing = torch.empty(0, dtype=torch.int64), torch.empty(0)
    for number, request in enumerate(requests):
        begun = {r.index: r for r in request.begun}
        for sibling in range(request.first, request.first + request.n):
            before = begun.get(sibling) or Rollout(sibling, *nothing, "cut")
            done = len(before.token_ids)
            tokens = min(sampling.budget or sampling.max_tokens, sampling.max_tokens - done)
            ids = (*request.prompt.token_ids, *before.token_ids.tolist())
            yield _Row(number, ids, before, tokens, stream_key("engine", request.key, sibling, done))
