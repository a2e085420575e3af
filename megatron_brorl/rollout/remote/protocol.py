"""Messages between trainer ranks and an engine process, and the interface of an engine backend in that process.

A message consists of a versioned JSON header and the bytes of the tensors that the header lists. It contains no pickle,
because the two processes may have different versions of torch and Python.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from megatron_brorl.rollout.engine import Sampling

PROTOCOL = 8  # incremented with every change of a message
_DTYPES = {"int64": torch.int64, "float32": torch.float32, "uint8": torch.uint8, "int16": torch.int16}

# {"path": file in host memory, "records": list of weights_in_worker.TensorRecord}
WorkerBucket = dict[str, object]


class ProtocolError(RuntimeError):
    """The peer runs another version, or sent invalid data."""


@dataclass(frozen=True)
class Message:
    """One message. Fields are JSON values. Tensors are one-dimensional, of _DTYPES."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


def encode(message: Message) -> list[bytes]:
    """Return the frames of a message."""
    table = [[name, str(x.dtype).removeprefix("torch."), len(x)] for name, x in message.tensors.items()]
    header = {"protocol": PROTOCOL, "kind": message.kind, "fields": dict(message.fields), "tensors": table}
    return [json.dumps(header).encode(), *(x.contiguous().numpy().tobytes() for x in message.tensors.values())]


def decode(frames: Sequence[bytes]) -> Message:
    """Parse a message. Raises ProtocolError."""
    # Check the version before reading anything else, because other versions may have any format.
    try:
        header = json.loads(frames[0])
        protocol = header["protocol"]
    except (ValueError, LookupError, TypeError) as e:
        raise ProtocolError(f"not a message of the engine protocol: {e}") from None
    if protocol != PROTOCOL:
        raise ProtocolError(
            f"trainer and engine process have different protocols ({protocol} and {PROTOCOL}): both must run the same "
            "version of megatron_brorl"
        )

    table = header["tensors"]
    if len(table) != len(frames) - 1:
        raise ProtocolError(f"{header['kind']}: {len(frames) - 1} tensors arrived, the header lists {len(table)}")
    tensors = {}
    for (name, dtype, length), data in zip(table, frames[1:], strict=True):
        # frombuffer would silently return fewer numbers from a shorter frame.
        if len(data) != length * _DTYPES[dtype].itemsize:
            raise ProtocolError(f"{header['kind']}: {name} has {len(data)} bytes, not {length} of {dtype}")
        # Copy the bytes, because the socket owns the frame's memory. frombuffer refuses empty buffers.
        empty = torch.empty(0, dtype=_DTYPES[dtype])
        tensors[name] = torch.frombuffer(bytearray(data), dtype=_DTYPES[dtype]) if length else empty
    return Message(header["kind"], header["fields"], tensors)


@dataclass(frozen=True)
class EngineOptions:
    """Options of an engine process, passed to it as JSON."""

    engine: str  # key of rollout.registry.ENGINES
    model: str  # Hugging Face directory with config.json, and with a tokenizer for stop strings
    vocab: int
    context: int  # maximum number of prompt + response tokens
    dtype: str  # "bfloat16" or "float32"
    max_rows: int  # maximum number of rollouts in flight
    stop_ids: tuple[int, ...]
    section: Mapping[str, Any]  # the config section [engine]
    stop_strings: tuple[str, ...] = ()  # if not empty, the engine needs the tokenizer
    agents: bool = False  # whether single requests may have stop strings
    threads: int = 0  # CPU threads, without a GPU; 0 = the engine's default
    kv_bytes: int = 0  # memory for keys and values, without a GPU
    max_kv_tokens: int = 0  # tokens whose keys and values fit by the memory plan; 0 = unlimited
    routes: bool = False  # the engine must return Completion.routes

    @property
    def key(self) -> str:
        """The config setting that selects the engine, for error messages."""
        return f'rollout.engine = "{self.engine}"'


@dataclass(frozen=True)
class Capabilities:
    """Properties of a running engine."""

    engine: str  # name and version, for messages
    kv_tokens: int  # tokens whose keys and values fit in its memory, measured
    rows: int  # maximum number of rollouts that it computes together


@dataclass(frozen=True)
class Completion:
    """The result of one rollout request."""

    token_ids: list[int]  # new tokens; the backend may omit them if the rollout is "cut"
    finish: Literal["stop", "length", "cut"]  # cut: aborted
    log_probs: list[float]  # of each token under the sampling distribution; empty if not requested
    routes: Tensor | None = None  # see Rollout.routes; uint8 or int16

    @classmethod
    def of(cls, token_ids: Sequence[int], reason: str | None, reported: Sequence[Mapping[int, float]]) -> Completion:
        """Convert an engine's output.

        reason: the engine's finish reason; all but "stop" and "length" become "cut". reported: log-probabilities by
        token id at each position, or empty. Raises ValueError if a sampled token has none.
        """
        if reported and len(reported) != len(token_ids):
            raise ValueError(f"{len(reported)} log-probs for {len(token_ids)} tokens")
        for token, entry in zip(token_ids, reported, strict=False):
            if token not in entry:
                raise ValueError(f"no log-prob of the sampled token {token} among {len(entry)} reported")
        log_probs = [entry[token] for token, entry in zip(token_ids, reported, strict=False)]
        if reason == "stop":
            return cls(list(token_ids), "stop", log_probs)
        return cls(list(token_ids), "length" if reason == "length" else "cut", log_probs)


class EngineBackend(Protocol):
    """The engine of this process. All methods run in one event loop.

    rollout.registry names the class of each engine. Its constructor takes the options, and raises ValueError if this
    version of the engine does not support them.
    """

    options: EngineOptions

    async def start(self) -> Capabilities:
        """Start the workers with random weights."""

    def params(self, sampling: Sampling, tokens: int, seed: int) -> Any:
        """Return the engine's sampling parameters for one rollout of at most `tokens` tokens."""

    def submit(self, ids: Sequence[int], params: Any) -> Any:
        """Submit one rollout and return its handle."""

    async def completion(self, handle: Any) -> Completion:
        """Wait for a rollout and return its result."""

    def abort(self, handle: Any) -> None:
        """Cancel a rollout. Its completion is then "cut"."""

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the worker extension in every worker and return all results."""

    async def begin(self) -> None:
        """Prepare the workers for a new version of the weights, if they need it."""

    async def load(self, bucket: WorkerBucket) -> None:
        """Load a bucket in all workers. Raises if a tensor fails its checksum; the weights are then inconsistent."""
        await self.call_workers("brorl_load", bucket)

    async def finish(self) -> None:
        """Finish loading and drop the caches of the old weights."""
        await self.call_workers("brorl_finish")

    async def sleep(self) -> None:
        """Free the memory of weights and caches."""

    async def wake(self) -> None:
        """Allocate the memory of everything except the KV cache. The trainer then sends the weights."""

    async def wake_caches(self) -> None:
        """Allocate the memory of the KV cache. All ranks of the node must have freed theirs."""
