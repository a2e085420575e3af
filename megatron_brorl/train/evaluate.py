"""Held-out evaluation: n samples per prompt, pass@1 with an interval, unbiased pass@k."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from megatron_brorl.algo.pass_at_k import pass_at_each_k
from megatron_brorl.algo.statistics import RESAMPLES, SHARE, Bounds, Interval, bootstrap_mean, bootstrap_mean_of_means
from megatron_brorl.config.schema import EvaluateConfig
from megatron_brorl.errors import UserError
from megatron_brorl.parallel import collectives
from megatron_brorl.rollout.engine import Sampling
from megatron_brorl.rollout.sampler import make_groups
from megatron_brorl.train.groups import Outcomes, gather_outcomes
from megatron_brorl.train.sample_and_score import RolloutRunner, check_lost, check_scored
from megatron_brorl.types import Prompt, PromptGroup, ScoredRollout

# Receives the groups, this rank's rollouts and the outcomes of all ranks.
OnSamples = Callable[[Sequence[PromptGroup], Sequence[ScoredRollout], Outcomes], None]


@dataclass(frozen=True)
class Evaluation:
    pass_at_1: Interval  # 95% bootstrap interval over prompts
    pass_at_k: dict[int, float]
    by_task: dict[str, Interval]  # pass@1 of the prompts of each task (Prompt.task)
    verifiers: list[str]  # those that scored the samples
    mean_reward: Interval  # over prompts
    response_tokens: float
    prompts: int
    samples: int
    lost: int  # samples that never ended; the metrics are over the others

    def remark(self) -> str:
        """Return a warning about lost samples, or ""."""
        total = self.prompts * self.samples
        return f"{self.lost} of {total} samples were lost; the metrics are over the others" if self.lost else ""

    def as_dict(self) -> dict[str, Any]:
        """Return the evaluation as it is written to files."""
        return {**asdict(self), "pass_at_k": {str(k): v for k, v in self.pass_at_k.items()}}


@dataclass(frozen=True)
class PromptResult:
    """The result of one prompt's samples."""

    prompt: Prompt
    index: int  # among all prompts; a prompt may occur twice
    samples: int  # without the lost ones; at least 1
    right: int
    reward: float  # mean
    tokens: float  # mean length of the responses
    reward_counts: Sequence[int]  # samples with each reward, by ascending reward

    def as_dict(self) -> dict[str, Any]:
        """Return the line for an evaluation's file."""
        names = ("samples", "right", "reward", "tokens", "reward_counts")
        return {"id": self.prompt.id, "task": self.prompt.task, **{name: getattr(self, name) for name in names}}


def sample_answers(
    runner: RolloutRunner, prompts: Sequence[Prompt], n: int, sampling: Sampling, on_samples: OnSamples | None = None
) -> list[PromptResult]:
    """Sample every prompt n times over all ranks, and return the same results on every rank. Collective.

    Lost samples are left out, and so is a prompt that lost all of them. Raises UserError if too many samples are lost,
    or the verifiers fail on most of them.
    """
    groups = make_groups(prompts, "evaluate")  # not a round, so that evaluations of two policies are paired
    slots = list(product(range(len(groups)), range(n)))
    runner.pool.reset()
    rollouts, counts, _ = runner.sample(slots, groups, sampling, renew_limit=True)

    outcomes = gather_outcomes(rollouts, len(groups), n)
    sums = collectives.all_reduce_sum(counts)
    check_scored("evaluation", sums, runner.reported)
    check_lost("evaluation", int((~outcomes.ended).sum()), len(groups) * n, runner.max_lost_share)

    if on_samples:
        on_samples(groups, rollouts, outcomes)

    results = []
    for g, ended, rewards, correct, tokens in zip(
        groups, outcomes.ended, outcomes.rewards.double(), outcomes.right, outcomes.sampled.double(), strict=True
    ):
        if ended.any():
            results.append(
                PromptResult(
                    prompt=g.prompt,
                    index=g.index,
                    samples=int(ended.sum()),
                    right=int(correct[ended].sum()),
                    reward=float(rewards[ended].mean()),
                    tokens=float(tokens[ended].mean()),
                    reward_counts=rewards[ended].unique(return_counts=True)[1].tolist(),
                )
            )

    # With rollout.max_lost_share = 1, check_lost allows that every sample is lost.
    if not results:
        raise UserError("evaluation: every sample was lost, so there is nothing to report")
    return results


def summarize(results: Sequence[PromptResult], prompts: int, config: EvaluateConfig, seed: int) -> Evaluation:
    """Return the evaluation of at least one result. prompts: number of prompts, with those that lost all samples.

    Each prompt counts by its own number of samples.
    """
    total = sum(r.samples for r in results)
    values_by_k = pass_at_each_k([(r.samples, r.right) for r in results])
    tasks: dict[str, list[float]] = {}
    for r in results:
        tasks.setdefault(r.prompt.task, []).append(r.right / r.samples)
    return Evaluation(
        pass_at_1=bootstrap_mean([r.right / r.samples for r in results], RESAMPLES, seed, SHARE),
        pass_at_k={k: sum(values) / len(values) for k, values in values_by_k.items()},
        by_task={name: bootstrap_mean(shares, RESAMPLES, seed, SHARE) for name, shares in sorted(tasks.items())},
        verifiers=sorted({r.prompt.verifier for r in results}),
        # The interval of equal values needs bounds, which are known only for rewards of 0 and 1.
        mean_reward=bootstrap_mean([r.reward for r in results], RESAMPLES, seed, _bounds(results)),
        response_tokens=sum(r.tokens * r.samples for r in results) / total,
        prompts=prompts,
        samples=config.samples,
        lost=prompts * config.samples - total,
    )


def mean_over(benchmarks: Sequence[Sequence[PromptResult]], seed: int) -> dict[str, Any]:
    """Return pass@1 and mean reward averaged over benchmarks with equal weights, with intervals."""
    shares = [[r.right / r.samples for r in results] for results in benchmarks]
    rewards = [[r.reward for r in results] for results in benchmarks]
    bounds = _bounds([r for results in benchmarks for r in results])
    return {
        "pass_at_1": bootstrap_mean_of_means(shares, RESAMPLES, seed, SHARE).as_dict(),
        "mean_reward": bootstrap_mean_of_means(rewards, RESAMPLES, seed, bounds).as_dict(),
    }


def _bounds(results: Sequence[PromptResult]) -> Bounds | None:
    """Return the bounds of a prompt's mean reward: 0 and 1 if rewards are 1 for correct responses and 0 for others."""
    return SHARE if all(r.reward == r.right / r.samples for r in results) else None
