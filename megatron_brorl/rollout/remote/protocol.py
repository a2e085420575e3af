"""Messages between trainer ranks and an engine process, and the interface of an engine's leaf in that process.

A message is a versioned JSON header and raw tensors, never a pickle, because both ends may run different versions of
torch and Python. Its frames are the header and then the bytes of each tensor that the header lists.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from megatron_brorl.rollout.engine import Sampling

PROTOCOL = 6  # raised with every change of a message
_DTYPES = {"int64": torch.int64, "float32": torch.float32}
_PROBE_TOKENS = 16  # enough that two independent draws do not agree by chance

# {"path": file in host memory, "records": list of weights_receive.TensorRecord}
WorkerBucket = dict[str, object]


class ProtocolError(RuntimeError):
    """The other end runs another version, or sent something else than a message."""


@dataclass(frozen=True)
class Message:
    """One message. Fields are JSON values; tensors are int64 or float32 of one dimension."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


def encode(message: Message) -> list[bytes]:
    """Return the frames of a message."""
    table = [[name, str(x.dtype).removeprefix("torch."), len(x)] for name, x in message.tensors.items()]
    header = {"protocol": PROTOCOL, "kind": message.kind, "fields": dict(message.fields), "tensors": table}
    return [json.dumps(header).encode(), *(x.contiguous().numpy().tobytes() for x in message.tensors.values())]


def decode(frames: Sequence[bytes]) -> Message:
    """Return the message of `frames`. Raises ProtocolError."""
    # A message of another version may have any form, so nothing but the version is read before it fits.
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
        raise ProtocolError(f"{header['kind']}: {len(frames) - 1} tensors came, the header lists {len(table)}")
    tensors = {}
    for (name, dtype, length), data in zip(table, frames[1:], strict=True):
        # Without this check frombuffer would make fewer numbers from a shorter frame.
        if len(data) != length * _DTYPES[dtype].itemsize:
            raise ProtocolError(f"{header['kind']}: {name} has {len(data)} bytes, not {length} of {dtype}")
        # The bytes are copied because a frame's memory is the socket's; an empty frame has none.
        empty = torch.empty(0, dtype=_DTYPES[dtype])
        tensors[name] = torch.frombuffer(bytearray(data), dtype=_DTYPES[dtype]) if length else empty
    return Message(header["kind"], header["fields"], tensors)


@dataclass(frozen=True)
class EngineOptions:
    """Arguments of an engine process."""

    engine: str  # key of rollout.registry.ENGINES
    model: str  # Hugging Face directory; engines read its config.json, and its tokenizer for stop strings
    vocab: int
    context: int  # prompt + response tokens at most
    dtype: str  # "bfloat16", or "float32" in tests on a CPU
    max_rows: int  # in flight at a time, at most
    stop_ids: tuple[int, ...]
    section: Mapping[str, Any]  # all keys of section [engine]
    stop_strings: tuple[str, ...] = ()  # with any, the engine needs the tokenizer
    threads: int = 0  # of an engine on CPUs; 0 = the engine's default
    kv_bytes: int = 0  # for keys and values of an engine on CPUs
    max_kv_tokens: int = 0  # for keys and values by the trainer's memory plan; 0 = as many as fit

    @property
    def key(self) -> str:
        """The choice of the engine in messages."""
        return f'rollout.engine = "{self.engine}"'


@dataclass(frozen=True)
class Capabilities:
    """Properties of an engine that its leaf determines at startup."""

    engine: str  # name and version, for messages
    kv_tokens: int  # tokens whose keys and values its memory holds, measured
    rows: int  # rollouts that it computes at a time


@dataclass(frozen=True)
class Completion:
    """The outcome of one rollout."""

    token_ids: list[int]  # the tokens that were added; for a "cut" rollout the leaf may leave them out
    finish: Literal["stop", "length", "cut"]  # cut: aborted
    log_probs: list[float]  # of each token under the distribution that it was drawn from; empty: not asked for

    @classmethod
    def of(cls, token_ids: Sequence[int], reason: str | None, reported: Sequence[Mapping[int, float]]) -> Completion:
        """Return the completion of an engine's output.

        reason: the engine's word for the end, of which "stop" and "length" are kept. reported: log-probabilities by
        token id at each position, or nothing. Raises ValueError where a sampled token's is missing.
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
    """One engine in this process. All methods belong to one event loop.

    rollout.registry names its class, which is called with the options and raises ValueError if this version of the
    engine does not support them.
    """

    options: EngineOptions

    async def start(self) -> Capabilities:
        """Start the workers with random weights. Raises ValueError as `check_sampling`."""

    def params(self, sampling: Sampling, tokens: int, seed: int) -> Any:
        """Return the engine's own sampling settings of one rollout of at most `tokens` tokens."""

    def submit(self, ids: Sequence[int], params: Any) -> Any:
        """Queue one rollout; returns a handle."""

    async def completion(self, handle: Any) -> Completion:
        """Wait for a rollout."""

    def abort(self, handle: Any) -> None:
        """Give a rollout up; its completion is then "cut"."""

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the extension in every worker, and return what each returns."""

    async def begin(self) -> None:
        """Begin a new version of the weights."""
        await self.call_workers("brorl_begin")

    async def load(self, bucket: WorkerBucket) -> None:
        """Let all workers load a bucket. Raises if a tensor fails its checksum; the weights are mixed then."""
        await self.call_workers("brorl_load", bucket)

    async def finish(self, names: Sequence[str]) -> None:
        """Generate with the new weights from now on, and forget the caches of others.

        Raises where other tensors than `names` were loaded.
        """
        await self.call_workers("brorl_finish", list(names))

    async def sleep(self) -> None:
        """Give the memory of weights and caches back."""

    async def wake(self) -> None:
        """Take the memory of everything but caches again; weights follow."""

    async def wake_caches(self) -> None:
        """Take the memory of keys and values again, when all ranks of the node have given back theirs."""


async def check_sampling(backend: EngineBackend, engine: str) -> None:
    """Raise ValueError unless a request's seed determines the sampled tokens and the engine returns log-probs.

    engine: name and version of the engine, for the message.
    """
    first, again, other = [await _draw(backend, seed) for seed in (1, 1, 2)]
    if first.token_ids != again.token_ids or first.token_ids == other.token_ids:
        raise ValueError(f"{engine} takes no seed per request: siblings on different engines would repeat one another")
    if len(first.log_probs) != len(first.token_ids):
        raise ValueError(f"{engine} reports no log-probs of sampled tokens")


async def _draw(backend: EngineBackend, seed: int) -> Completion:
    """Return one rollout of a few tokens at temperature 1."""
    options = backend.options
    ids = [i % options.vocab for i in range(min(8, options.context // 2))]
    tokens = min(_PROBE_TOKENS, options.context - len(ids))
    params = backend.params(Sampling(1.0, 1.0, 0, tokens, options.stop_ids), tokens, seed)
    return await backend.completion(backend.submit(ids, params))
