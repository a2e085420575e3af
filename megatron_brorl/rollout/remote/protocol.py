"""What an engine's leaf does for the server: the part of an engine process that differs from engine to engine."""

from __future__ import annotations

from asyncio import Task
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from megatron_brorl.rollout.remote.options import Capabilities, EngineOptions, WorkerBucket


@dataclass(frozen=True)
class Completion:
    """What became of one rollout."""

    token_ids: list[int]  # that were added; of one that was cut, where Capabilities.keeps_cut, else any
    finish: Literal["stop", "length", "cut"]  # cut: aborted
    reported: Sequence[Mapping[int, float]]  # log-probability by token id, of each token; empty: not asked for

    @classmethod
    def of(cls, token_ids: Sequence[int], reason: str | None, reported: Sequence[Mapping[int, float]]) -> Completion:
        """reason: in the engine's words, in which "stop" and "length" mean what they mean here."""
        return cls(list(token_ids), "stop" if reason == "stop" else "length" if reason == "length" else "cut", reported)


@dataclass(frozen=True)
class Named:
    """A rollout in flight, of an engine that knows it by a name."""

    name: str
    task: Task[Completion]


class EngineLeaf(Protocol):
    """One engine in this process. All methods belong to one event loop.

    A class Llm(options) in the module that rollout.registry names; its constructor raises ValueError where this version
    of the engine cannot do what is asked.
    """

    options: EngineOptions

    async def start(self) -> Capabilities:
        """Bring the workers up and find out what they do, with random weights.

        Raises ValueError where siblings could not differ or no log-probs come back.
        """

    def params(
        self,
        temperature: float,
        top_p: float,
        top_k: int,
        tokens: int,
        seed: int,
        log_probs: bool = True,
        stop_strings: Sequence[str] = (),
    ) -> Any:
        """The engine's own sampling settings of one rollout of at most `tokens` tokens."""

    def submit(self, ids: Sequence[int], params: Any) -> Any:
        """Queue one rollout; returns a handle."""

    async def completion(self, handle: Any) -> Completion:
        """Wait for a rollout."""

    def abort(self, handle: Any) -> None:
        """Give a rollout up; its completion is then "cut"."""

    async def begin(self) -> None:
        """A new version of the weights begins."""

    async def load(self, bucket: WorkerBucket) -> None:
        """Let all workers load a bucket. Raises where a tensor is not what was sent; the weights are mixed then."""

    async def finish(self, names: Sequence[str]) -> None:
        """The weights are complete: generate with them, and forget what was cached of others. Raises where other
        tensors than `names` were loaded."""

    async def sleep(self) -> None:
        """Give the memory of weights and caches back."""

    async def wake(self) -> None:
        """Take the memory of everything but caches again; weights follow."""

    async def wake_caches(self) -> None:
        """Take the memory of keys and values again: all ranks of the node have given back what they do without."""

    async def reseed(self, seed: int) -> None:
        """Seed the one generator of an engine whose requests have no seeds of their own."""
