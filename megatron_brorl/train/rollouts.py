"""Sampling and scoring: from prompts to scored groups on this rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_brorl.config import RewardConfig
from megatron_brorl.data.tokenizers import Tokenizer
from megatron_brorl.rewards.pool import RewardPool
from megatron_brorl.rewards.scoring import score_groups
from megatron_brorl.rollout.engine import RolloutEngine, Sampling
from megatron_brorl.rollout.sampler import requests
from megatron_brorl.types import Prompt, RolloutGroup, ScoredGroup


@dataclass(frozen=True)
class Sampled:
    groups: list[ScoredGroup]
    verdicts: dict[str, int]  # how many responses ended with each status of rewards.pool.Verdict
    seconds: dict[str, float]  # "generate", "score"


@dataclass(frozen=True)
class Rollouts:
    """The engine and the verifiers of one rank."""

    engine: RolloutEngine
    pool: RewardPool
    tokenizer: Tokenizer
    reward: RewardConfig
    seed: int

    def sample(self, prompts: Sequence[Prompt], n: int, sampling: Sampling, step: int | str) -> Sampled:
        """n scored rollouts for each prompt. `step` names the random streams."""
        start = time.monotonic()
        groups = self.engine.generate(requests(prompts, n, self.seed, step), sampling)
        middle = time.monotonic()
        texts = [self._texts(g, sampling.stop_ids) for g in groups]
        scored, verdicts = score_groups(groups, texts, self.pool, self.reward)
        return Sampled(scored, verdicts, {"generate": middle - start, "score": time.monotonic() - middle})

    def _texts(self, group: RolloutGroup, stop_ids: tuple[int, ...]) -> list[str]:
        """Responses as text without their stop token. Siblings repeat one another, so each text is decoded once."""
        cache: dict[tuple[int, ...], str] = {}
        texts = []
        for rollout in group.rollouts:
            ids = tuple(rollout.token_ids.tolist())
            if ids and ids[-1] in stop_ids:
                ids = ids[:-1]
            if ids not in cache:
                cache[ids] = self.tokenizer.decode(list(ids))
            texts.append(cache[ids])
        return texts


def figures(sampled: Sampled) -> dict[str, float]:
    """This rank's sums over its rollouts; they add up over ranks."""
    rollouts = [r for s in sampled.groups for r in s.group.rollouts]
    rewards = torch.cat([s.rewards for s in sampled.groups]) if sampled.groups else torch.zeros(0)
    return {
        "groups": float(len(sampled.groups)),
        "rollouts": float(len(rollouts)),
        "reward": float(rewards.double().sum()),
        "tokens": float(sum(len(r.token_ids) for r in rollouts)),
        "cut_off": float(sum(r.finish == "length" for r in rollouts)),
        "all_right": float(sum(bool((s.rewards == 1).all()) for s in sampled.groups)),
        "all_wrong": float(sum(bool((s.rewards == 0).all()) for s in sampled.groups)),
        "unscored": float(sum(sampled.verdicts.get(s, 0) for s in ("timeout", "error", "invalid", "crash"))),
    }
