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
    if config.overlong_tokens:
        result = result + soft_overlong(tokens, max_tokens, config.overlong_tokens).to(rewards.dtype)
    if config.cosine_coef and cycle_is_on(step, config.cosine_on_steps, config.cosine_off_steps):
        bonus = config.cosine_coef * cosine_length(tokens, max_tokens, config.cosine_min, config.cosine_max)
        result = torch.where(right, result + bonus.to(rewards.dtype), result)
    if config.repetition_ngram:
        result = result - config.repetition_penalty * repeats.to(rewards.dtype)
    return result


def soft_overlong(tokens: Tensor, max_tokens: int, cache: int) -> Tensor:
    """Return 0 up to max_tokens - cache tokens, then linearly down to -1 at max_tokens (DAPO, Yu et al. 2025, eq. 13).

    tokens: of each response, [...]; the result [...] is float64.
    """
    return ((max_tokens - cache - tokens.double()) / cache).clamp(-1.0, 0.0)


def cosine_length(tokens: Tensor, max_tokens: int, low: float, high: float) -> Tensor:
    """Return low + (high - low) (1 + cos(pi t / max_tokens)) / 2 for t tokens (ProRLv2): high at 0, low at max_tokens.

    tokens: of each response, [...]; the result [...] is float64.
    """
    return low + (high - low) * (1 + (math.pi * tokens.double() / max_tokens).cos()) / 2


def cycle_is_on(step: int, on: int, off: int) -> bool:
    """Return whether a cycle of `on` and then `off` steps, which begins at step 0, is on."""
    return not off or step % (on + off) < on


def repeated_ngrams(token_ids: Tensor, n: int, sampled: Tensor | None = None) -> int:
    """Return how many n-grams of a response [G] have occurred in it before.

    sampled: bool [G], false for tokens of an environment; n-grams with such tokens do not count. None: all true.
    """
    windows = token_ids.unfold(0, n, 1) if len(token_ids) >= n else token_ids.new_zeros(0, n)
    if sampled is not None and len(windows):
        windows = windows[sampled.unfold(0, n, 1).all(dim=1)]
    return len(windows) - len(windows.unique(dim=0))
