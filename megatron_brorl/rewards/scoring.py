"""From sampled groups and their texts to rewards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import get_args

import torch

from megatron_brorl.config.schema import RewardConfig
from megatron_brorl.rewards.extract import extract
from megatron_brorl.rewards.pool import RewardPool, ScoreRequest, Status
from megatron_brorl.types import CORRECT, Prompt, RolloutGroup, ScoredGroup

_RAISED = {
    "error": "verifier {} raised on an answer, which scores 0 (figure verdict_errors)",
    "broken": "verifier {} is broken: it raises on a reference answer too",
}


def score_groups(
    groups: Sequence[RolloutGroup], texts: Sequence[Sequence[str]], pool: RewardPool, config: RewardConfig
) -> tuple[list[ScoredGroup], dict[str, int], dict[str, str]]:
    """Score rollout j of group i by texts[i][j], its decoded response without the end-of-sequence token.

    Strict: partial credit is none. A response cut off at the length limit scores cut_off_factor of its reward, and is
    not looked at where that is 0. Also returns how many rollouts had each status of pool.Verdict, or "length" for those
    not looked at, and of each verifier that raised, in words, the first exception.
    """
    requests = []
    unseen: list[bool] = []
    factors: list[float] = []
    for group, responses in zip(groups, texts, strict=True):
        for rollout, text in zip(group.rollouts, responses, strict=True):
            factors.append(config.cut_off_factor if rollout.finish == "length" else 1.0)
            unseen.append(not factors[-1])
            answer = None if unseen[-1] else extract(text, config.extract, config.max_chars)
            requests.append(ScoreRequest(group.prompt, answer))
    verdicts = pool.score(requests)
    counts = Counter(dict.fromkeys((*get_args(Status), "length"), 0))
    counts.update("length" if u else v.status for u, v in zip(unseen, verdicts, strict=True))
    credit = [float(v.reward >= CORRECT) if config.strict else v.reward for v in verdicts]
    rewards = torch.tensor([f * c for f, c in zip(factors, credit, strict=True)], dtype=torch.float32)
    answers = iter([r.answer for r in requests])
    parts = rewards.split([len(group.rollouts) for group in groups])
    scored = [
        ScoredGroup(group, part.clone(), tuple(next(answers) for _ in group.rollouts))
        for group, part in zip(groups, parts, strict=True)
    ]
    raised: dict[str, str] = {}
    for request, verdict in zip(requests, verdicts, strict=True):
        if verdict.status in _RAISED:
            raised.setdefault(_RAISED[verdict.status].format(_name(request.prompt)), verdict.reason)
    return scored, dict(counts), raised


def _name(prompt: Prompt) -> str:
    task = prompt.metadata.get("source_dataset")
    return f"{prompt.verifier} ({task})" if task else prompt.verifier
