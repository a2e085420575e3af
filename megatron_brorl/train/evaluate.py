"""Held-out evaluation: k samples per prompt, pass@1 with an interval, unbiased pass@k."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_brorl.algo.estimators import Interval, bootstrap_mean, pass_at_k
from megatron_brorl.config import EvaluateConfig
from megatron_brorl.errors import UserError
from megatron_brorl.rollout.engine import Sampling
from megatron_brorl.rollout.sampler import even_cuts
from megatron_brorl.train.groups import gather
from megatron_brorl.train.rollouts import Rollouts, check_lost
from megatron_brorl.types import CORRECT, OpenGroup, Prompt


@dataclass(frozen=True)
class Evaluation:
    pass_at_1: Interval  # 95% bootstrap interval over prompts
    pass_at_k: dict[int, float]
    by_task: dict[str, float]  # pass@1 of each verifier task
    mean_reward: float
    response_tokens: float
    prompts: int
    samples: int
    lost: int  # samples that never ended; the figures are over the others

    def remark(self) -> str:
        """What a reader must know about the figures; empty where nothing was lost."""
        total = self.prompts * self.samples
        return f"{self.lost} of {total} samples were lost; the figures are over the others" if self.lost else ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "pass_at_1": self.pass_at_1.as_dict(),
            "pass_at_k": {str(k): v for k, v in self.pass_at_k.items()},
            "by_task": self.by_task,
            "mean_reward": self.mean_reward,
            "response_tokens": self.response_tokens,
            "prompts": self.prompts,
            "samples": self.samples,
            "lost": self.lost,
        }


def evaluate(rollouts: Rollouts, prompts: Sequence[Prompt], config: EvaluateConfig, sampling: Sampling) -> Evaluation:
    """Sample every prompt config.samples times, shared over all ranks; the same result on every rank.

    The random streams do not depend on the training step, so that evaluations of two policies are paired. Lost samples
    are counted and left out: a prompt's share of passes is over its survivors, and a prompt with fewer than k of them
    is left out of pass@k.
    """
    n, grid = config.samples, rollouts.grid
    groups = [OpenGroup(prompt, "evaluate", place) for place, prompt in enumerate(prompts)]
    own = even_cuts(len(groups) * n, [0] * grid.world)[grid.rank : grid.rank + 2]
    sampled = rollouts.sample([divmod(i, n) for i in range(*own)], groups, sampling)
    outcomes = gather(sampled.rows, len(groups), n, None)
    lost = int((~outcomes.ended).sum())
    check_lost("evaluation", lost, len(groups) * n, rollouts.most_lost)
    correct = ((outcomes.rewards >= CORRECT) & outcomes.ended).sum(dim=1).tolist()
    survivors = outcomes.ended.sum(dim=1).tolist()
    passed = [(c, m) for c, m in zip(correct, survivors, strict=True) if m]
    if not passed:
        raise UserError("evaluation: every sample was lost, so there is nothing to report")
    tasks: dict[str, list[float]] = {}
    for prompt, c, m in zip(prompts, correct, survivors, strict=True):
        if m:
            tasks.setdefault(str(prompt.metadata.get("source_dataset", prompt.verifier)), []).append(c / m)
    return Evaluation(
        pass_at_1=bootstrap_mean([c / m for c, m in passed], config.bootstrap, rollouts.seed),
        pass_at_k={k: _mean([pass_at_k(m, c, k) for c, m in passed if m >= k]) for k in _powers(max(survivors))},
        by_task={name: _mean(values) for name, values in sorted(tasks.items())},
        mean_reward=float(outcomes.rewards.double().sum()) / sum(survivors),
        response_tokens=float(outcomes.tokens[outcomes.ended].sum()) / sum(survivors),
        prompts=len(prompts),
        samples=n,
        lost=lost,
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _powers(samples: int) -> list[int]:
    """1, 2, 4, ... up to samples, which is always the last."""
    ks = [1]
    while ks[-1] * 2 <= samples:
        ks.append(ks[-1] * 2)
    return ks if ks[-1] == samples else [*ks, samples]
