"""From sampled groups and their texts to rewards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import get_args

import torch

from megatron_brorl.config import RewardConfig
from megatron_brorl.rewards.extract import extract
from megatron_brorl.rewards.pool import RewardPool, ScoreRequest, Status
from megatron_brorl.types import RolloutGroup, ScoredGroup

CORRECT = 0.99  # a strict reward is 1 from here on


def score_groups(
    groups: Sequence[RolloutGroup], texts: Sequence[Sequence[str]], pool: RewardPool, config: RewardConfig
) -> tuple[list[ScoredGroup], dict[str, int]]:
    """Score rollout j of group i by texts[i][j], its decoded response without the end-of-sequence token.

    Strict: a response cut off at the length limit scores 0, and partial credit is none. Also returns how many
    rollouts had each status of pool.Verdict, or "length" for those cut off.
    """
    requests = []
    cut: list[bool] = []
    for group, responses in zip(groups, texts, strict=True):
        for rollout, text in zip(group.rollouts, responses, strict=True):
            cut.append(config.strict and rollout.finish == "length")
            answer = None if cut[-1] else extract(text, config.extract, config.max_chars)
            requests.append(ScoreRequest(group.prompt, answer))
    verdicts = pool.score(requests)
    counts = Counter(dict.fromkeys((*get_args(Status), "length"), 0))
    counts.update("length" if c else v.status for c, v in zip(cut, verdicts, strict=True))
    rewards = torch.tensor([v.reward for v in verdicts], dtype=torch.float32)
    if config.strict:
        rewards = torch.tensor([float(v.reward >= CORRECT) for v in verdicts], dtype=torch.float32)
    parts = rewards.split([len(group.rollouts) for group in groups])
    return [ScoredGroup(group, part.clone()) for group, part in zip(groups, parts, strict=True)], dict(counts)
