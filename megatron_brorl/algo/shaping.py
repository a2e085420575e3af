"""Terms that are added to the reward of a response for its length and its repetitions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_brorl.config.shaping import ShapingConfig


def shaped(
    rewards: Tensor,
    right: Tensor,
    tokens: Tensor,
    repeats: Tensor,
    config: ShapingConfig,
    max_tokens: int,
    step: int,
) -> Tensor:
    """Return the rewards with all terms that the configuration adds at a step; tensors [...] of one shape.

    right bool: whether a response counts as correct. tokens: those of each response that the model sampled, at most
    max_tokens. repeats: number of repeated n-grams of each response (repeated_ngrams).
    """
    result = rewards
    sampled = tokens.double()
    if config.overlong_tokens:
        # 0 up to max_tokens - overlong_tokens, then linearly down to -1 at max_tokens (DAPO, Yu et al. 2025, eq. 13).
        penalty = ((max_tokens - config.overlong_tokens - sampled) / config.overlong_tokens).clamp(-1.0, 0.0)
        result = result + penalty.to(rewards.dtype)
    # A cycle of cosine_on_steps and then cosine_off_steps begins at step 0.
    on, off = config.cosine_on_steps, config.cosine_off_steps
    if config.cosine_coef and (not off or step % (on + off) < on):
        # From cosine_max at 0 tokens to cosine_min at max_tokens (ProRLv2).
        share = (1 + (math.pi * sampled / max_tokens).cos()) / 2
        bonus = config.cosine_coef * (config.cosine_min + (config.cosine_max - config.cosine_min) * share)
        result = torch.where(right, result + bonus.to(rewards.dtype), result)
    if config.repetition_ngram:
        result = result - config.repetition_penalty * repeats.to(rewards.dtype)
    return result


def repeated_ngrams(token_ids: Tensor, n: int, sampled: Tensor | None = None) -> int:
    """Return how many n-grams of a response [G] have occurred in it before.

    sampled: bool [G], false for tokens of an environment; n-grams with such tokens do not count. None: all true.
    """
    windows = token_ids.unfold(0, n, 1) if len(token_ids) >= n else token_ids.new_zeros(0, n)
    if sampled is not None and len(windows):
        windows = windows[sampled.unfold(0, n, 1).all(dim=1)]
    return len(windows) - len(windows.unique(dim=0))
