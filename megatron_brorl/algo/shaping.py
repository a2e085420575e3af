"""Terms that are added to the reward of a response for its length and its repetitions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_brorl.config.schema import ShapingConfig

# The cosine length reward of ProRLv2: its bounds, and the steps that are on and off in turn.
_COSINE_LOW = -0.5
_COSINE_HIGH = 0.0
_COSINE_ON_STEPS = 100
_COSINE_OFF_STEPS = 500
_REPETITION_PENALTY = 0.001  # of ProRLv2, for each repeated n-gram


def shaped(
    rewards: Tensor, right: Tensor, tokens: Tensor, repeats: Tensor, config: ShapingConfig, max_tokens: int, step: int
) -> Tensor:
    """Return the rewards with all terms that the configuration adds at a step; tensors [...] of one shape.

    right: bool, whether a response counts as correct. tokens: number of tokens that the model sampled for it, at most
    max_tokens. repeats: number of repeated n-grams of each response (repeated_ngrams).
    """
    result = rewards
    sampled = tokens.double()
    if config.overlong_tokens:
        # 0 up to max_tokens - overlong_tokens, then linearly down to -1 at max_tokens (DAPO, Yu et al. 2025, eq. 13).
        penalty = ((max_tokens - config.overlong_tokens - sampled) / config.overlong_tokens).clamp(-1.0, 0.0)
        result = result + penalty.to(rewards.dtype)
    if config.cosine_coef and step % (_COSINE_ON_STEPS + _COSINE_OFF_STEPS) < _COSINE_ON_STEPS:
        # From _COSINE_HIGH at 0 tokens to _COSINE_LOW at max_tokens (ProRLv2).
        share = (1 + (math.pi * sampled / max_tokens).cos()) / 2
        bonus = config.cosine_coef * (_COSINE_LOW + (_COSINE_HIGH - _COSINE_LOW) * share)
        result = torch.where(right, result + bonus.to(rewards.dtype), result)
    if config.repetition_ngram:
        result = result - _REPETITION_PENALTY * repeats.to(rewards.dtype)
    return result


def repeated_ngrams(token_ids: Tensor, n: int, sampled: Tensor | None = None) -> int:
    """Return how many n-grams of a response [G] have occurred in it before.

    sampled: bool [G], false for tokens of an environment; n-grams with such tokens do not count. None: all true.
    """
    windows = token_ids.unfold(0, n, 1) if len(token_ids) >= n else token_ids.new_zeros(0, n)
    if sampled is not None and len(windows):
        windows = windows[sampled.unfold(0, n, 1).all(dim=1)]
    return len(windows) - len(windows.unique(dim=0))
