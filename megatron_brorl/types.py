"""The data types of a training step, from prompts to experience.

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
from typing import Any, Literal, NamedTuple

from torch import Tensor

# "stop": a stop token or string. "length": rollout.max_tokens. "cut": unfinished; a later call may continue it.
FinishReason = Literal["stop", "length", "cut"]
# The outcome of a score request; see ScoreResult.
Status = Literal["ok", "timeout", "error", "broken", "invalid", "crash", "no_answer"]


@dataclass(frozen=True)
class Demonstration:
    """A response of several turns for supervised training."""

    token_ids: tuple[int, ...]
    trained: tuple[bool, ...]  # false: a token of an observation or of the template around it


@dataclass(frozen=True)
class Prompt:
    """A prompt with its reference answer and its verifier."""

    id: str  # unique in its source; part of the key of the random stream
    text: str  # the text that was tokenized
    token_ids: tuple[int, ...]
    answer: str | None  # the reference answer, if there is one
    verifier: str  # name in megatron_brorl.rewards.registry
    metadata: Mapping[str, Any] = field(default_factory=dict)  # additional data for the verifier
    target: str | None = None  # the response for supervised training; None: the answer
    demonstration: Demonstration | None = None  # the response for supervised training if it has observations
    columns: Mapping[str, Any] = field(default_factory=dict)  # of the file, as read, without those of the fields above

    @property
    def task(self) -> str:
        """Return the name under which results are reported: metadata.task, the reasoning-gym task, or the verifier."""
        return str(self.metadata.get("task") or self.metadata.get("source_dataset") or self.verifier)

    def row(self) -> dict[str, Any]:
        """Return the data row as users' functions receive it (rewards.verifier.VerifierRow)."""
        row = {"id": self.id, "prompt": self.text, "answer": self.answer}
        return {**row, "metadata": self.metadata, "columns": self.columns}


@dataclass(frozen=True)
class Episode:
    """The part of a rollout that comes from its environment."""

    sampled: Tensor  # [G] bool; false: a token of the environment, which has log-probability 0 and is not trained on
    turns: int  # turns of the model
    calls: int = 0  # tool calls, with malformed ones
    malformed: int = 0  # tool calls that could not be parsed or executed with their arguments
    score: ScoreResult | None = None  # the environment's reward; None while the rollout is unfinished
    # Of an agent: the index of the first token of each sequence, which begins with a prompt that is not sampled.
    starts: tuple[int, ...] = ()
    text: str | None = None  # of an agent: the answer for the row's verifier; None if the agent has given the score


@dataclass(frozen=True)
class Rollout:
    """One sampled response. With an environment it is the whole episode after the prompt: turns and observations.

    With an agent it is one or more sequences (Episode.starts) one after the other, each with its prompt.
    """

    index: int  # 0 <= index < N among the siblings of its prompt
    token_ids: Tensor  # [G] int64, with the end-of-sequence token if finish == "stop"
    log_probs: Tensor  # [G] float32 under the sampling distribution (temperature, top-p, top-k)
    finish: FinishReason
    spans: tuple[tuple[int, int], ...] = ()  # (version of the weights, tokens) in order; all tokens sum to G
    episode: Episode | None = None  # None: a single turn without an environment
    # [prompt + G - 1, layers, k] uint8 or int16: the experts of every token but the last. None: not recorded.
    routes: Tensor | None = None

    @property
    def sampled_tokens(self) -> int:
        """Return the number of tokens that the model sampled."""
        return len(self.token_ids) if self.episode is None else int(self.episode.sampled.sum())

    def parts(self) -> list[tuple[bool, Tensor]]:
        """Return the token ids of each turn (true) and each observation (false) in order."""
        if self.episode is None:
            return [(True, self.token_ids)]
        kinds, counts = self.episode.sampled.unique_consecutive(return_counts=True)
        return list(zip(kinds.tolist(), self.token_ids.split(counts.tolist()), strict=True))


@dataclass(frozen=True)
class PromptGroup:
    """A prompt and the key of the random stream of its N rollouts. The same on all ranks."""

    prompt: Prompt
    round: int | str  # number of the sampling round that began it, or the name of an evaluation; part of the key
    index: int  # among the prompts of the round
    occurrence: int = 0  # how often the prompt occurs earlier in the round; part of the key
    start: int = 0  # index in the prompt source of the first prompt of the round


@dataclass(frozen=True)
class ScoreResult:
    """The reward of one request; 0 unless the status is ok.

    timeout: scoring took longer than the deadline. error: the verifier raised an exception. broken: it also raises one
    for the reference answer. invalid: it did not return a finite number. crash: its process died or wrote an invalid
    result twice. no_answer: the response has no answer.
    """

    reward: float
    status: Status
    reason: str = field(default="", compare=False)  # for error and broken: the exception's type and first line
    parts: Mapping[str, float] = field(default_factory=dict, compare=False)  # the terms of the reward by name


@dataclass(frozen=True)
class ScoredRollout:
    """A rollout with its group and its reward."""

    group: int  # index among the groups of the step
    rollout: Rollout
    reward: float  # nan while the rollout is "cut"
    right: bool  # whether the response counts as correct (rewards.scoring.final_reward); false while it is "cut"
    answer: int = 0  # rewards.extract.answer_hash of the final answer
    score: ScoreResult | None = field(default=None, compare=False)  # for the rollout log; None while it is "cut"


@dataclass(frozen=True)
class TrainingRollout:
    """A rollout on the replica that trains on it, as train.redistribute delivers it."""

    group: int  # index among the groups of the step
    index: int  # 0 <= index < N among the siblings of its prompt
    token_ids: Tensor  # [G] int64
    log_probs: Tensor  # [G] float32, from the engine
    right: bool
    sampled: Tensor | None = None  # [G] bool; false: a token of an environment. None: the model sampled all
    starts: tuple[int, ...] = ()  # see Episode.starts
    routes: Tensor | None = None  # see Rollout.routes


class RowWeight(NamedTuple):
    """Weights of a row in the policy loss if a step trains on a part of each group (train.groups.Subset)."""

    loss: float  # factor of the row's loss
    tokens: float  # sampled tokens that divisors count for the row
    sequences: float  # sequences that divisors count for the row


@dataclass(frozen=True)
class Experience:
    """B rollouts ready to train on, from any number of prompts. Every tuple has length B.

    Log-probabilities, advantages, values, returns and mask are on the device of the process. The other tensors are on
    the CPU, where packing reads them. Tokens of an environment are inputs of the model only. They have no part in
    losses, divisors or metrics, and 0 in all columns of numbers.
    """

    prompts: tuple[Tensor, ...]  # [prompt tokens] int64 each; siblings share one tensor
    responses: tuple[Tensor, ...]  # [G] int64 each
    rollout_log_probs: tuple[Tensor, ...]  # [G] float32 each, from the engine
    old_log_probs: tuple[Tensor, ...] | None  # [G] float32 each, of the actor; None: the actor is unchanged
    advantages: tuple[Tensor, ...]  # [G] float32 each
    values: tuple[Tensor, ...] | None = None  # [G] float32 each, of the critic before its update
    returns: tuple[Tensor, ...] | None = None  # [G] float32 each, the targets of the critic
    reference_log_probs: tuple[Tensor, ...] | None = None  # [G] float32 each, of the reference policy
    mask: tuple[Tensor, ...] | None = None  # [G] bool each; false: no policy loss on the token. None: all true
    # [G] bool each; false: a token of an environment, where `mask` is false, too. Divisors count all other tokens.
    sampled: tuple[Tensor, ...] | None = None  # None: all true
    # [prompt + G - 1, layers, k] each, experts that the actor must use; None: its routers choose.
    routes: tuple[Tensor, ...] | None = None
    # Group and sibling index of each row. Rows with the same slot are the sequences of one rollout, which counts once
    # in means. (): each row is a rollout.
    slots: tuple[tuple[int, int], ...] = ()
    weights: tuple[RowWeight, ...] = ()  # with algo.train_on; (): each row stands for itself
    ids: tuple[str, ...] = ()  # prompt id and rollout index of each row, for messages

    def __len__(self) -> int:
        return len(self.responses)

    def sampled_tokens(self) -> list[int]:
        """Return the number of tokens of each response that the model sampled."""
        if self.sampled is None:
            return [len(ids) for ids in self.responses]
        return [int(row.sum()) for row in self.sampled]

    def select(self, rows: list[int]) -> Experience:
        """Return the given rows in the given order. Columns that are None or () stay so."""
        return Experience(**{name: column and tuple(column[i] for i in rows) for name, column in vars(self).items()})
