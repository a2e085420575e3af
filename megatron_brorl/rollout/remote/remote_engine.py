"""A rollout engine in another process. The ranks that share it send requests over a socket.

The first of these ranks is the leader. It starts the process, sends it the weights and restarts it after a crash. After
a restart, the ranks request unfinished rollouts again with the same seeds. The current weights stay in shared memory,
so that a restart does not need the other ranks. An engine never generates with weights of mixed versions.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_brorl.config.schema import Config, EngineConfig
from megatron_brorl.errors import UserError, warn
from megatron_brorl.files import read_object
from megatron_brorl.parallel import collectives, cpu_bridge
from megatron_brorl.rollout.engine import GenerateCallbacks, KvUsage, Request, Sampling, Supply, check_context
from megatron_brorl.rollout.native.pages import spare_memory
from megatron_brorl.rollout.registry import ENGINES, START_TIMEOUT_S
from megatron_brorl.rollout.remote.pending import PendingRollout, PendingRollouts, generate_message
from megatron_brorl.rollout.remote.process import Connection, EngineError, Supervisor, address, make_folder
from megatron_brorl.rollout.remote.protocol import Capabilities, EngineOptions, Message
from megatron_brorl.rollout.remote.weights_in_trainer import (
    HostWeights,
    NodeRanks,
    WeightUpdate,
    to_fp8_blocks,
    unchanged,
    write_update,
)
from megatron_brorl.rollout.weight_stream import UpdateRefused
from megatron_brorl.types import Rollout

_POLL_S = 0.05  # seconds per wait for messages
_STOP_S = 10.0  # seconds that an engine has to end cancelled calls


@dataclass(eq=False)
class RemoteEngine:
    """One rank's connection to an engine process; see rollout.engine.RolloutEngine.

    The leader starts the process, and all ranks wait until it answers. Raises UserError if it does not start or does
    not support the configuration.
    """

    settings: EngineConfig
    options: EngineOptions
    names: dict[str, tuple[int, ...]]  # shape of every Hugging Face tensor of the model
    folder: Path  # from process.make_folder, the same on all ranks that share the engine
    devices: Sequence[int] | None  # the engine's CUDA devices on the leader, None on other ranks
    log: Path  # receives the output of the process
    node: NodeRanks | None = None  # the ranks that write updates together; None if only the leader writes them
    decode: Callable[[Sequence[int]], str] | None = None  # tokens -> text, for stop strings
    wait_for_ranks: Callable[[], object] = lambda: None  # a barrier of the ranks that share the engine

    def __post_init__(self) -> None:
        self.dtype: torch.dtype = getattr(torch, self.options.dtype)
        self.version = -1
        self.is_leader = self.devices is not None
        self.supervisor: Supervisor | None = None
        self.node = self.node or (NodeRanks() if self.is_leader else None)
        self._calls = 0
        self._open_calls: set[int] = set()  # calls of the current generate that have not ended
        self._link = Connection(address(self.folder))

        # If this fails, close() removes the process and the folder.
        try:
            if self.devices is not None:
                self.supervisor = Supervisor(self.settings, self.options, self.folder, self.devices, self.log)
            self.capabilities = self._wait_for_capabilities()
        except UserError:
            self.close()
            raise

    @property
    def duplicate_advice(self) -> str:
        return f'{self.capabilities.engine}; start a new run with rollout.engine = "torch"'

    @property
    def rows(self) -> int:
        """Return the number of rollouts that this rank has in flight with a shared supply.

        It is the rank's share of the rollouts that the engine computes together, if each fills half of the context.
        Further rollouts would wait inside the engine, while another rank's engine may have room.
        """
        rows = min(self.capabilities.rows, 2 * self.capabilities.kv_tokens // self.options.context)
        return max(1, rows // self.settings.tensor)

    def _wait_for_capabilities(self) -> Capabilities:
        deadline = time.monotonic() + START_TIMEOUT_S
        while self._link.capabilities is None:
            self._link.poll(_POLL_S)
            if time.monotonic() > deadline:
                raise UserError(
                    f"the engine of another rank did not start within {START_TIMEOUT_S:g} s; see the error of that rank"
                )
        return self._link.capabilities

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See RolloutEngine; tensors [any shape].

        The ranks of the node write the stream to shared memory and check all of it. Then the engine loads it. If the
        engine holds weights, they stay in shared memory until then.
        """
        # Only the leader sends weights. train.weight_sync then asks all ranks whether an engine refused them.
        if self.supervisor is None:
            self.skip_update(tensors)
            self.version = version  # generate waits until the engine reports this version
            return

        weights = self._write_update(tensors, version)
        try:
            self.supervisor.update(weights)
        except EngineError as e:
            raise UpdateRefused(f"weight update: {e}") from None
        self.version = version

    def skip_update(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See RolloutEngine; tensors [any shape]."""
        if self.node is None:
            for _ in tensors:  # producing each tensor is a collective
                pass
            return
        self._write_update(tensors, self.version)

    def _write_update(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> HostWeights:
        """Write and check an update in shared memory. Collective of the node."""
        assert self.node
        # Keep the file of the current weights, from which a crashed engine restarts.
        current = self.supervisor.weights if self.supervisor else None
        number = 1 if current and current.path.name == "weights_0" else 0
        in_blocks = self.settings.quantization == "fp8" and ENGINES[self.options.engine].takes_fp8_blocks
        update = WeightUpdate(version, self.names, self.dtype, to_fp8_blocks if in_blocks else unchanged)
        return write_update(tensors, update, self.node, self.folder / f"weights_{number}")

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        callbacks: GenerateCallbacks | None = None,
        supply: Supply | None = None,
    ) -> list[list[Rollout]]:
        """See RolloutEngine.

        Every rollout is a separate request with its own seed. Siblings share their prompt in the engine's prefix cache.
        Cancelled rollouts lose the tokens of this call, unless the engine returns them.
        """
        if self.version < 0:
            raise RuntimeError("the engine has no weights: call update_weights first")
        check_context(requests, sampling, supply, self.options.context, "engine's")

        # Ignore answers to earlier calls, which may have ended by an exception.
        self._open_calls.clear()
        pending = PendingRollouts(sampling, callbacks, supply, self.rows, self.options.vocab, self.decode)
        pending.add(requests)
        pending.admit()

        asked_pid = 0  # process that received the requests, which may end meanwhile; 0 = none
        rows = pending.rows
        self._link.say_hello()  # The process answers with its pid and the version of its weights.
        while (rows or (supply and supply.has_more())) and not (callbacks and callbacks.cancelled()):
            # The supervisor has given up. Ranks without a supervisor wait until the watchdog cancels them.
            if self.supervisor and self.supervisor.failure:
                raise UserError(f"{self.options.key}: {self.supervisor.failure}")

            # A new process has no requests. Send all missing requests once it has this version of the weights.
            if rows and self._link.pid != asked_pid and self._link.version == self.version:
                self._open_calls.clear()
                asked_pid = self._ask(rows, sampling)

            for message in self._link.poll(_POLL_S if rows else 0.0):
                if message.fields.get("call") not in self._open_calls:
                    continue  # answer to an abandoned call
                if message.kind == "stale":  # The engine has other weights. Ask again when it has the right weights.
                    asked_pid = 0
                    self._open_calls.clear()
                elif message.kind == "error":
                    raise RuntimeError(f"engine process: {message.fields['what']}")
                else:
                    self._handle(message, pending)

            if asked_pid and (numbers := pending.withdrawn()):
                self._cancel(numbers)

            # If all calls have ended but answers are missing, request them again.
            if asked_pid and rows and not self._open_calls:
                asked_pid = 0

            # Finished rollouts make room for new rollouts, and waiting rollouts may have become ready.
            new = pending.admit()
            if new and asked_pid == self._link.pid:
                self._ask(new, sampling)

        if rows:
            self._stop(pending)
        elif self.supervisor:
            self.supervisor.restarts = 0  # only consecutive restarts count

        if pending.faults:
            text = f"{len(pending.faults)} rollouts with invalid answers are lost, for example: {pending.faults[0]}"
            warn(f"{self.options.key}: {text}")
        return pending.result()

    def _ask(self, rows: Mapping[int, PendingRollout], sampling: Sampling) -> int:
        """Request these rollouts in a new call. Return the pid of the process that receives it."""
        pid = self._link.pid
        self._calls += 1
        self._open_calls.add(self._calls)
        self._link.send(generate_message(rows, sampling, {"call": self._calls, "version": self.version}))
        return pid

    def _handle(self, message: Message, pending: PendingRollouts) -> None:
        if message.kind == "rollout":
            pending.answered(message, self.version)
        elif message.kind == "ended":
            self._open_calls.discard(message.fields["call"])

    def _cancel(self, numbers: list[int]) -> None:
        for call in self._open_calls:
            self._link.send(Message("cancel", {"call": call, "numbers": numbers}))

    def _stop(self, pending: PendingRollouts) -> None:
        """Cancel all open calls. Kill an engine that does not end them in time.

        This call does not wait for the new process, because the watchdog would take that for a hanging engine.
        """
        self._cancel(list(pending.rows))
        deadline = time.monotonic() + _STOP_S
        while self._open_calls and time.monotonic() < deadline:
            for message in self._link.poll(_POLL_S):
                if message.fields.get("call") in self._open_calls:
                    self._handle(message, pending)
        if self._open_calls and self.supervisor:
            self.supervisor.kill(f"engine process {self.supervisor.pid} did not cancel its requests")

    def kv_usage(self) -> KvUsage | None:
        """See RolloutEngine: the process does not report it."""
        return None

    def restart(self, why: str) -> bool:
        """See RolloutEngine. Raises UserError if the engine does not start again."""
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
        # The engine uses the GPUs of all its ranks. No rank may load its models before the engine has freed its memory.
        self.barrier()

    def wake(self) -> None:
        """See RolloutEngine. Raises UserError if the engine does not start again."""
        # Every rank must have offloaded its models before the engine allocates memory.
        self.barrier()
        try:
            if self.supervisor:
                self.supervisor.wake()
        except EngineError as e:
            raise UserError(f"{self.options.key}: {e}") from None

    def barrier(self) -> None:
        self.wait_for_ranks()

    def close(self) -> None:
        """End the process and remove its folder."""
        self._link.close()
        if self.supervisor:
            self.supervisor.close()
        if self.is_leader:
            shutil.rmtree(self.folder, ignore_errors=True)


def connect_engine(
    config: Config,
    names: dict[str, tuple[int, ...]],
    context: int,
    vocab: int,
    stop_ids: tuple[int, ...],
    kv_tokens: int = 0,
    decode: Callable[[Sequence[int]], str] | None = None,
    routes: bool = False,
) -> RemoteEngine:
    """Start or join an engine of type rollout.engine and return this rank's connection. Collective of all ranks.

    engine.tensor consecutive ranks of a node share one engine. names: shape of every Hugging Face tensor. context:
    maximum number of prompt + response tokens. kv_tokens: tokens whose keys and values fit by the memory plan; 0 =
    unknown. decode: tokens -> text, for stop strings. routes: whether training needs Rollout.routes. Raises UserError
    if engine.tensor does not divide the ranks of the node, or if the engine does not start.
    """
    engine = config.rollout.engine
    settings = config.engine
    kind = ENGINES[engine]
    model = Path(config.model.path).resolve()
    _check_stop_strings(config.stop_strings, kind.name, model)
    if routes and not kind.returns_routes:
        raise UserError(
            f'rollout.replay_routes = "{config.rollout.replay_routes}": {kind.name} does not return the experts of a '
            'token; set "never"'
        )

    # torchrun sets these variables. Without torchrun, this rank is the only one on its node.
    rank = dist.get_rank()
    tensor = settings.tensor
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if per_node % tensor:
        raise UserError(
            f"engine.tensor = {tensor} does not divide the {per_node} ranks of a node (LOCAL_WORLD_SIZE): an engine "
            "spans the GPUs of its ranks"
        )
    # The dtypes are limited only on a GPU; tests on a CPU use other dtypes.
    if cpu_bridge.on_gpu() and config.rollout.dtype not in kind.dtypes:
        raise UserError(
            f'rollout.dtype = "{config.rollout.dtype}": {kind.name} engines compute in {", ".join(kind.dtypes)}; set '
            f'rollout.dtype = "{kind.dtypes[0]}"'
        )

    # Leaders create folders, and all ranks exchange the paths. The checks above fail on all ranks.
    is_leader = local_rank % tensor == 0
    folders = collectives.all_gather(str(make_folder(settings.shared_memory)) if is_leader else "")
    exchange = _exchange(rank - local_rank, per_node, config.parallel.timeout_s)
    engine_exchange = _exchange(rank - local_rank % tensor, tensor, config.parallel.timeout_s)

    options = EngineOptions(
        engine=engine,
        model=str(model),
        vocab=vocab,
        context=context,
        dtype={"bf16": "bfloat16", "fp32": "float32"}[config.rollout.dtype],
        max_rows=config.rollout.max_num_seqs,
        stop_ids=stop_ids,
        stop_strings=config.stop_strings,
        agents=bool(config.agent.function),
        threads=torch.get_num_threads() * tensor,
        kv_bytes=(config.rollout.kv_cache_mib * 2**20 or spare_memory(torch.device("cpu"))) * tensor,
        max_kv_tokens=kv_tokens,
        routes=routes,
        section=asdict(settings),
    )
    return RemoteEngine(
        settings,
        options,
        names=names,
        folder=Path(folders[rank - local_rank % tensor]),
        devices=range(local_rank, local_rank + tensor) if is_leader else None,  # the GPUs of the ranks that share it
        log=Path(config.run.dir) / "engines" / f"rank_{rank}.log",
        node=NodeRanks(local_rank, per_node, exchange),
        decode=decode,
        wait_for_ranks=lambda: engine_exchange(None),
    )


def _check_stop_strings(strings: Sequence[str], engine: str, model: Path) -> None:
    """Raise UserError if the engine would find stop strings at other positions than the built-in engine."""
    path = model / "tokenizer.json"
    if strings and not path.is_file():
        raise UserError(
            f"rollout.stop_strings: {engine} finds them with the model's tokenizer.json, and {model} has none: stop "
            'at tokens only, or set rollout.engine = "torch"'
        )

    # Many decoders drop a space at the start of a text. The engine decodes the response after the prompt, so that only
    # the engine would find a stop string whose leading space starts the response.
    spaced = [s for s in strings if s.startswith(" ")]
    if spaced and (read_object(path).get("decoder") or {}).get("type") != "ByteLevel":
        raise UserError(
            f"rollout.stop_strings: {spaced[0]!r} begins with a space, and {path} drops the space at the start of a "
            f'response, which {engine} does not: leave the space out, or set rollout.engine = "torch"'
        )


def _exchange(first: int, size: int, timeout_s: float) -> Callable[[Any], list[Any]]:
    """Return an all-gather of objects over gloo among the ranks first .. first + size - 1."""
    # Nodes may have different numbers of ranks, and new_group is a collective of all ranks.
    group = None
    for start, count in sorted(span for span in set(collectives.all_gather((first, size))) if span[1] > 1):
        ranks = list(range(start, start + count))
        new_group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), backend="gloo")
        group = new_group if start == first else group
    return (lambda value: collectives.all_gather(value, group)) if size > 1 else (lambda value: [value])
