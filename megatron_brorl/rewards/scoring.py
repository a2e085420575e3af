"""From sampled responses and their texts to rewards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from megatron_brorl.config.schema import RewardConfig
from megatron_brorl.rewards.extract import Found, extract
from megatron_brorl.rewards.pool import RewardPool, ScoreRequest, Status
from megatron_brorl.rewards.registry import entry
from megatron_brorl.types import CORRECT, Prompt, Rollout

_RAISED = {
    "error": "verifier {} raised on an answer, which scores 0 (figure verdict_errors)",
    "broken": "verifier {} is broken: it raises on a reference answer too",
    "invalid": "verifier {} gave no score, so that its answer scores 0",
}


@dataclass(frozen=True)
class Scores:
    """What the verifiers made of B rollouts."""

    rewards: Tensor  # [B] float32
    answers: list[str | None]  # what of each response was judged; None: it has no answer, or was not looked at
    counts: dict[str, int]  # rollouts of each status of pool.Verdict, and "length": those not looked at
    raised: dict[str, str]  # of each verifier that raised or gave no score, in words: the first time


def score_rollouts(
    prompts: Sequence[Prompt],
    rollouts: Sequence[Rollout],
    texts: Sequence[str],
    pool: RewardPool,
    config: RewardConfig,
) -> Scores:
    """Score rollout i, a response to prompts[i], by texts[i]: it decoded, without the end-of-sequence token.

    Strict: partial credit is none. A response cut off at the length limit scores cut_off_factor of its reward, and is
    not looked at where that is 0.
    """
    # What there is to judge.
    # An answer is found as its verifier looks for it, or as the configuration has it for all.
    entries = {name: entry(name, "verifier", config) for name in {prompt.verifier for prompt in prompts}}
    factors = [config.cut_off_factor if rollout.finish == "length" else 1.0 for rollout in rollouts]
    requests = []
    for prompt, factor, text in zip(prompts, factors, texts, strict=True):
        judged_by = entries[prompt.verifier]
        found = extract(text, judged_by.find, judged_by.max_chars) if factor else Found(None, "cut off")
        requests.append(ScoreRequest(prompt, *found))
    verdicts = pool.score(requests)

    # Rewards, in float32 as they are carried.
    credit = [float(v.reward >= CORRECT) if config.strict else v.reward for v in verdicts]
    rewards = torch.tensor([f * c for f, c in zip(factors, credit, strict=True)], dtype=torch.float32)

    # How the verifiers fared.
    counts = Counter(dict.fromkeys((*get_args(Status), "length"), 0))
    counts.update(v.status if f else "length" for f, v in zip(factors, verdicts, strict=True))
    raised: dict[str, str] = {}
    for prompt, verdict in zip(prompts, verdicts, strict=True):
        if verdict.status in _RAISED:
            row = f"row {prompt.id}: " if verdict.status == "invalid" else ""
            raised.setdefault(_RAISED[verdict.status].format(_name(prompt)), row + verdict.reason)
    return Scores(rewards, [request.answer for request in requests], dict(counts), raised)


def _name(prompt: Prompt) -> str:
    task = prompt.metadata.get("source_dataset")
    return f"{prompt.verifier} ({task})" if task else prompt.verifier
