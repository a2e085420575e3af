"""What flows through a training step: one frozen type per arrow.

Shape legend, used in every docstring:
    P  prompts of a step              N  rollouts per prompt
    B  rollouts (rows), P * N         G  tokens of one response
    T  tokens of a packed stream      R  response tokens of a packed stream
    V  vocabulary                     H  hidden size
Log-probabilities are natural logarithms (nats) in float32. Rewards are finite float32 numbers of either sign.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

# By a stop token or string; by rollout.max_tokens; not finished: by the call's token budget or a cancellation.
FinishReason = Literal["stop", "length", "cut"]


# What the pool of verifiers says of a request; see ScoreResult.
Status = Literal["ok", "timeout", "error", "broken", "invalid", "crash", "no_answer"]


@dataclass(frozen=True)
class Prompt:
    """A verifiable task, as the data layer hands it out."""

    id: str  # unique in its source; part of the key of the random stream
    text: str  # exactly what was tokenized
    token_ids: tuple[int, ...]
    answer: str | None  # the reference answer, if the task has one
    verifier: str  # name in megatron_brorl.rewards.registry
    metadata: Mapping[str, Any] = field(default_factory=dict)  # what the verifier needs besides the answer
    target: str | None = None  # what supervised training imitates; None: the answer


@dataclass(frozen=True)
class Rollout:
    """One sampled response."""

    index: int  # 0 <= index < N among the siblings of its prompt
    token_ids: Tensor  # [G] int64, the end-of-sequence token included when finish == "stop"
    log_probs: Tensor  # [G] float32 under the sampling distribution (temperature, top-p, top-k)
    finish: FinishReason
    # (version of the weights, tokens), in order; they sum to G. A row that came by train.exchange has none.
    spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class OpenGroup:
    """A prompt whose N siblings are being sampled, over one step or several; the same on every rank."""

    prompt: Prompt
    step: int | str  # that it was taken up in, which names its random stream
    place: int  # among the prompts of that step
    occurrence: int = 0  # earlier places of that step that have the same prompt; names the stream as well
    start: int = 0  # where the prompts of that step begin in the source's stream


@dataclass(frozen=True)
class ScoreResult:
    """The reward of one request; 0 unless the status is ok.

    timeout: took longer than the deadline. error: the verifier raised on the answer. broken: it raises on the prompt's
    reference answer too. invalid: it returned something other than a finite number. crash: its process died, twice.
    no_answer: there was nothing to score.
    """

    reward: float
    status: Status
    reason: str = field(default="", compare=False)  # of error and broken: the exception's type and first line
    parts: Mapping[str, float] = field(default_factory=dict, compare=False)  # what the reward is made of


@dataclass(frozen=True)
class ScoredRollout:
    """One rollout, its group and its verdict: what is trained on, and what is carried over steps."""

    group: int  # index among the step's open groups
    rollout: Rollout
    reward: float  # nan while the rollout is "cut"
    right: bool  # whether the response counts as correct (rewards.scoring.final_reward); false while it is "cut"
    answer: int = 0  # rewards.extract.code of the final answer: equal answers have equal codes
    # What the reward was made of, for people; None while "cut", and of a row that came by train.exchange
    score: ScoreResult | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Experience:
    """B rollouts ready to train on, of any number of prompts. Every tuple has length B."""

    prompts: tuple[Tensor, ...]  # [prompt tokens] int64 each; siblings share one tensor
    responses: tuple[Tensor, ...]  # [G] int64 each
    rollout_log_probs: tuple[Tensor, ...]  # [G] float32 each, from the engine
    old_log_probs: tuple[Tensor, ...] | None  # [G] float32 each, of the actor; None: the actor has not moved since
    advantages: tuple[Tensor, ...]  # [G] float32 each
    values: tuple[Tensor, ...] | None = None  # [G] float32 each, of the critic before its update
    returns: tuple[Tensor, ...] | None = None  # [G] float32 each, which it learns to predict
    reference_log_probs: tuple[Tensor, ...] | None = None  # [G] float32 each, of the reference policy
    mask: tuple[Tensor, ...] | None = None  # [G] bool each; false: no policy loss on the token. None: all true
    ids: tuple[str, ...] = ()  # prompt id and sibling of each, for messages

    def __len__(self) -> int:
        return len(self.responses)

    def select(self, rows: list[int]) -> Experience:
        """The given rows, in the given order."""
        fields = {k: v and tuple(v[i] for i in rows) for k, v in vars(self).items()}
        return Experience(**fields)
