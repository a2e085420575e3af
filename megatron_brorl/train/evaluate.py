"""Held-out evaluation: k samples per prompt, pass@1 with an interval, unbiased pass@k."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from megatron_brorl.algo.pass_at_k import pass_at_k
from megatron_brorl.algo.statistics import RESAMPLES, SHARE, Bounds, Interval, bootstrap_mean, bootstrap_mean_of_means
from megatron_brorl.config.schema import EvaluateConfig
from megatron_brorl.errors import UserError
from megatron_brorl.parallel import collectives
from megatron_brorl.rollout.engine import Sampling
from megatron_brorl.rollout.sampler import open_groups
from megatron_brorl.train.groups import Outcomes, gather_outcomes
from megatron_brorl.train.sample_and_score import Rollouts, check_lost, check_scored
from megatron_brorl.types import OpenGroup, Prompt, ScoredRollout

# What is shown of samples beside figures: their groups, this rank's rollouts, and what became of those of all ranks.
See = Callable[[Sequence[OpenGroup], Sequence[ScoredRollout], Outcomes], None]


@dataclass(frozen=True)
class Evaluation:
    pass_at_1: Interval  # 95% bootstrap interval over prompts
    pass_at_k: dict[int, float]
    by_task: dict[str, float]  # pass@1 of each verifier task
    verifiers: list[str]  # that judged
    mean_reward: Interval  # as pass_at_1, over prompts
    response_tokens: float
    prompts: int
    samples: int
    lost: int  # samples that never ended; the figures are over the others

    def remark(self) -> str:
        """What a reader must know about the figures; empty where nothing was lost."""
        total = self.prompts * self.samples
        return f"{self.lost} of {total} samples were lost; the figures are over the others" if self.lost else ""

    def as_dict(self) -> dict[str, Any]:
        """The evaluation as files hold it."""
        return {
            "pass_at_1": self.pass_at_1.as_dict(),
            "pass_at_k": {str(k): v for k, v in self.pass_at_k.items()},
            "by_task": self.by_task,
            "verifiers": self.verifiers,
            "mean_reward": self.mean_reward.as_dict(),
            "response_tokens": self.response_tokens,
            "prompts": self.prompts,
            "samples": self.samples,
            "lost": self.lost,
        }


@dataclass(frozen=True)
class Answers:
    """What one prompt's samples came to."""

    prompt: Prompt
    place: int  # among the prompts that were asked, of which one may occur twice
    samples: int  # that were not lost; at least 1
    right: int
    reward: float  # mean
    tokens: float  # mean of the responses

    @property
    def task(self) -> str:
        """The verifier's task where it has several, otherwise the verifier."""
        return str(self.prompt.metadata.get("source_dataset", self.prompt.verifier))

    def as_dict(self) -> dict[str, Any]:
        """The line of an evaluation's file."""
        counted = {"samples": self.samples, "right": self.right, "reward": self.reward, "tokens": self.tokens}
        return {"id": self.prompt.id, "task": self.task, **counted}


def evaluate(
    rollouts: Rollouts, prompts: Sequence[Prompt], config: EvaluateConfig, sampling: Sampling, see: See | None = None
) -> Evaluation:
    """sample_answers of the prompts, summed up; the same result on every rank."""
    answers = sample_answers(rollouts, prompts, config.samples, sampling, see=see)
    return sum_up(answers, len(prompts), config, rollouts.seed)


def sample_answers(
    rollouts: Rollouts,
    prompts: Sequence[Prompt],
    n: int,
    sampling: Sampling,
    stream: str = "evaluate",
    on_end: Callable[[], None] | None = None,
    see: See | None = None,
) -> list[Answers]:
    """n samples of every prompt, shared over all ranks; the same result on every rank.

    The random streams are named by `stream` and not by the step, so that evaluations of two policies are paired. Lost
    samples are left out, and so is a prompt that lost all of its. on_end: told of every sample of this rank that ends.
    Raises UserError where too many were lost, or all, and where the verifiers failed on most.
    """
    # The stream takes the place of the step in the random numbers' key.
    groups = open_groups(prompts, stream)
    slots = list(product(range(len(groups)), range(n)))
    rollouts.pool.forget()  # verdicts are kept for one thing at a time
    sampled = rollouts.sample(slots, groups, sampling, on_end=on_end)

    outcomes = gather_outcomes(sampled.rollouts, len(groups), n)
    sums = collectives.all_reduce_sum(sampled.counts)
    check_scored("evaluation", sums["unscored"], sums["scored"])
    check_lost("evaluation", int((~outcomes.ended).sum()), len(groups) * n, rollouts.max_lost_share)

    if see:
        see(groups, sampled.rollouts, outcomes)

    found = []
    for g, ended, rewards, correct, tokens in zip(
        groups, outcomes.ended, outcomes.rewards.double(), outcomes.right, outcomes.tokens.double(), strict=True
    ):
        # A prompt that lost all of its samples has no mean.
        if ended.any():
            reward, length = rewards[ended], tokens[ended]
            right = int(correct[ended].sum())
            means = float(reward.mean()), float(length.mean())
            found.append(Answers(g.prompt, g.index, int(ended.sum()), right, *means))

    # rollout.max_lost_share = 1 lets even this come so far.
    if not found:
        raise UserError("evaluation: every sample was lost, so there is nothing to report")
    return found


def sum_up(answers: Sequence[Answers], prompts: int, config: EvaluateConfig, seed: int) -> Evaluation:
    """The figures of these answers to `prompts` prompts; at least one answer.

    A prompt's share of passes is over its own samples, and one with fewer than k of them is left out of pass@k.
    """
    total = sum(a.samples for a in answers)

    tasks: dict[str, list[float]] = {}
    for a in answers:
        tasks.setdefault(a.task, []).append(a.right / a.samples)
    ks = _powers(max(a.samples for a in answers))
    passes = {k: [pass_at_k(a.samples, a.right, k) for a in answers if a.samples >= k] for k in ks}

    # Intervals are over prompts; what was lost is what no sample came of.
    return Evaluation(
        pass_at_1=bootstrap_mean([a.right / a.samples for a in answers], RESAMPLES, seed, SHARE),
        pass_at_k={k: _mean(values) for k, values in passes.items() if values},
        by_task={name: _mean(values) for name, values in sorted(tasks.items())},
        verifiers=sorted({a.prompt.verifier for a in answers}),
        # Only rewards of 0 and 1 have known bounds, which equal values need for an interval.
        mean_reward=bootstrap_mean([a.reward for a in answers], RESAMPLES, seed, _bounds(answers)),
        response_tokens=sum(a.tokens * a.samples for a in answers) / total,
        prompts=prompts,
        samples=config.samples,
        lost=prompts * config.samples - total,
    )


def mean_over(benchmarks: Sequence[Sequence[Answers]], config: EvaluateConfig, seed: int) -> dict[str, Any]:
    """pass@1 and mean reward averaged over benchmarks, each of which counts alike, with their intervals."""
    shares = [[a.right / a.samples for a in answers] for answers in benchmarks]
    rewards = [[a.reward for a in answers] for answers in benchmarks]
    bounds = _bounds([a for answers in benchmarks for a in answers])
    return {
        "pass_at_1": bootstrap_mean_of_means(shares, RESAMPLES, seed, SHARE).as_dict(),
        "mean_reward": bootstrap_mean_of_means(rewards, RESAMPLES, seed, bounds).as_dict(),
    }


def _bounds(answers: Sequence[Answers]) -> Bounds | None:
    """What bounds a prompt's mean reward: rewards of 1 for correct and 0 for others have bounds, any others do not."""
    return SHARE if all(a.reward == a.right / a.samples for a in answers) else None


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _powers(samples: int) -> list[int]:
    """1, 2, 4, ... up to samples, which is always the last."""
    ks = [1]
    while ks[-1] * 2 <= samples:
        ks.append(ks[-1] * 2)
    return ks if ks[-1] == samples else [*ks, samples]
