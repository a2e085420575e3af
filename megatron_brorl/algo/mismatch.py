"""Tokens that engine and trainer disagree on too much to learn from."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megatron_brorl.algo.kl import MAX_LOG_RATIO


def mismatch_mask(old: Tensor, rollout: Tensor, by: Literal["token", "sequence"], low: float, high: float) -> Tensor:
    """Where low <= pi_old / pi_rollout <= high, bool [G], from log-probabilities [G] of one response in nats.

    "token": of each token (IcePop, Ling team 2025). "sequence": of the geometric mean over the response, all or none.
    """
    gap = (old - rollout).double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if by == "sequence":
        gap = gap.mean().expand(len(gap))
    ratio = gap.exp()
    return torch.logical_and(ratio >= low, ratio <= high)
