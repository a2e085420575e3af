"""Dynamic sampling: which groups carry a signal (Yu et al. 2025, DAPO, section 3.2; BroRL, section 3.1)."""

from __future__ import annotations

from torch import Tensor


def has_signal(rewards: Tensor) -> bool:
    """Whether the rewards [N] of a group differ. Exact comparison: the spread of 512 x 0.95 is rounding, not signal."""
    return bool(rewards.max() != rewards.min())
