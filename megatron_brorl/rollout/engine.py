"""What a rollout engine is: four verbs, and whom it tells on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_brorl.types import Prompt, Rollout

# (logits [B, V], keys, index, position [B], temperature, top_p, top_k) -> ids and log-probs [B]: sample_tokens of
# ops.reference.sampling or ops.fused.sampling.
SampleTokens = Callable[[Tensor, Tensor, Tensor, Tensor, float, float, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. temperature = 0 is greedy."""

    temperature: float
    top_p: float
    top_k: int  # 0 = off
    max_tokens: int  # of a response
    stop_ids: tuple[int, ...]  # a response ends with the first of these, which is part of it
    stop_strings: tuple[str, ...] = ()  # a response ends with the token that completes one of these in its text
    budget: int = 0  # tokens that one call adds to a response at most; what needs more comes back "cut". 0 = no limit
    log_probs: bool = True  # False: they are not needed, and may be nan


@dataclass(frozen=True)
class KvUsage:
    """How much of an engine's cache held keys and values in a call of generate, as shares of all of it."""

    peak: float
    mean: float  # over turns
    turns: int  # tokens that were drawn for all rows in flight
    prompt_tokens: int  # of every row that came in
    prompt_found: int  # of these, computed for another row and still there


@dataclass(frozen=True)
class Request:
    """n siblings of one prompt, numbered first .. first + n - 1 within the prompt's random stream."""

    prompt: Prompt
    key: int  # of ops.philox.stream_key: the random numbers are a function of (key, sibling, position)
    n: int
    first: int = 0
    begun: tuple[Rollout, ...] = ()  # siblings among them that were "cut" before, and go on from their tokens


class Watch(Protocol):
    """Follows one call of generate; called from the thread that generates, so both must be quick and thread-safe."""

    def finished(self, request: int, rollout: Rollout) -> None:
        """A rollout of requests[request] ended by itself; the engine may deliver it long before generate returns."""

    def cancelled(self) -> bool:
        """Asked at least once per token. Once true, generate ends soon, with what is unfinished "cut"."""


class Supply(Protocol):
    """Requests that wait for any rank's engine in a call of generate.

    Called from the thread that generates, between two tokens.
    """

    rows: int  # the most that may come of it
    prompt_tokens: int  # of the longest prompt that may come

    def take(self, room: int) -> list[Request]:
        """Return what the caller samples next, at most `room` rows; none where there is nothing for it now.

        Called once before the first token and whenever there is room. Other ranks' engines sample what is not taken.
        """

    def wait(self) -> bool:
        """For a caller that has no row: return True when it should `take` again, False where nothing will come."""


class RolloutEngine(Protocol):
    """Holds one full copy of the policy for generation."""

    version: int  # of the weights it holds; -1 before the first update

    @property
    def if_repeating(self) -> str:
        """Which engine this is, and what to do where it draws several rollouts by the same random numbers."""

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take full tensors [any shape] by Hugging Face name, or nothing at all.

        Raises rollout.receive.UpdateRefused, and keeps the version it has, where one is missing, unknown, of the wrong
        shape or not what its checksum says (pairs of ops.checksum.Sealed), or where the stream itself breaks off.
        """

    def decline_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take part in an update [any shape], as other ranks need it, and leave this engine alone; from any thread."""

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        watch: Watch | None = None,
        supply: Supply | None = None,
    ) -> list[list[Rollout]]:
        """Sample every request, and what is taken of the supply; returns the rollouts of each, by index.

        Requests are numbered in the order in which they came: those given, then those taken. Raises where weights were
        never given.
        """

    def kv_usage(self) -> KvUsage | None:
        """Of the last call of generate, until sleep; None of an engine that does not tell."""

    def renew(self, why: str) -> bool:
        """Begin anew with the weights that it has, where it is a process; False, on all ranks, where it is none."""

    def sleep(self) -> None:
        """Give memory back (weights and caches) until wake. Every rank that shares the engine calls it, and it returns
        when the memory of all their GPUs is free."""

    def wake(self) -> None:
        """Be ready for update_weights and generate again; weights must be sent anew. Every rank that shares the engine
        calls it, and the engine takes no memory before all of them have."""

    def meet(self) -> None:
        """Wait for the other ranks that share this engine. It stands for sleep or wake on a rank whose engine cannot be
        asked, because those of the other ranks wait for it."""
