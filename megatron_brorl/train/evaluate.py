"""Held-out evaluation: k samples per prompt, pass@1 with an interval, unbiased pass@k."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_brorl.algo.estimators import Interval, bootstrap_mean, pass_at_k
from megatron_brorl.config import EvaluateConfig
from megatron_brorl.parallel import device
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.rollout.engine import Sampling
from megatron_brorl.train.rollouts import Rollouts
from megatron_brorl.types import Prompt

CORRECT = 0.99  # a reward from here on counts as a pass


@dataclass(frozen=True)
class Evaluation:
    pass_at_1: Interval  # 95% bootstrap interval over prompts
    pass_at_k: dict[int, float]
    by_task: dict[str, float]  # pass@1 of each verifier task
    mean_reward: float
    response_tokens: float
    prompts: int
    samples: int

    def as_dict(self) -> dict[str, Any]:
        return {
            "pass_at_1": self.pass_at_1.as_dict(),
            "pass_at_k": {str(k): v for k, v in self.pass_at_k.items()},
            "by_task": self.by_task,
            "mean_reward": self.mean_reward,
            "response_tokens": self.response_tokens,
            "prompts": self.prompts,
            "samples": self.samples,
        }


def evaluate(
    rollouts: Rollouts, prompts: Sequence[Prompt], config: EvaluateConfig, sampling: Sampling, grid: Grid
) -> Evaluation:
    """Sample every prompt config.samples times, shared over all ranks; the same result on every rank.

    The random streams do not depend on the training step, so that evaluations of two policies are paired.
    """
    share = range(grid.rank, len(prompts), grid.world)
    sampled = rollouts.sample([prompts[i] for i in share], config.samples, sampling, "evaluate")
    # Per prompt: correct samples, rewards and response tokens; other ranks fill the other rows.
    table = torch.zeros(len(prompts), 3, dtype=torch.float64)
    for i, scored in zip(share, sampled.groups, strict=True):
        tokens = sum(len(r.token_ids) for r in scored.group.rollouts)
        rewards = scored.rewards.double()
        table[i] = torch.tensor([(rewards >= CORRECT).sum(), rewards.sum(), tokens], dtype=torch.float64)
    table = table.to(device.default_device())
    dist.all_reduce(table)
    correct = [int(c) for c in table[:, 0].tolist()]
    shares = [c / config.samples for c in correct]
    tasks: dict[str, list[float]] = {}
    for prompt, value in zip(prompts, shares, strict=True):
        tasks.setdefault(str(prompt.metadata.get("source_dataset", prompt.verifier)), []).append(value)
    total = len(prompts) * config.samples
    return Evaluation(
        pass_at_1=bootstrap_mean(shares, config.bootstrap, rollouts.seed),
        pass_at_k={
            k: sum(pass_at_k(config.samples, c, k) for c in correct) / len(prompts) for k in _powers(config.samples)
        },
        by_task={name: sum(values) / len(values) for name, values in sorted(tasks.items())},
        mean_reward=float(table[:, 1].sum()) / total,
        response_tokens=float(table[:, 2].sum()) / total,
        prompts=len(prompts),
        samples=config.samples,
    )


def _powers(samples: int) -> list[int]:
    """1, 2, 4, ... up to samples, which is always the last."""
    ks = [1]
    while ks[-1] * 2 <= samples:
        ks.append(ks[-1] * 2)
    return ks if ks[-1] == samples else [*ks, samples]
