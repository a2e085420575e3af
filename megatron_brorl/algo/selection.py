"""Dynamic sampling: which groups carry a signal (Yu et al. 2025, DAPO, section 3.2; BroRL, section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron_brorl.types import ScoredGroup


def has_signal(rewards: Tensor) -> bool:
    """Whether the rewards [N] of a group differ. Exact comparison: the spread of 512 x 0.95 is rounding, not signal."""
    return bool(rewards.max() != rewards.min())


def keep_informative(groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    """The groups with 0 < correct < N (for rewards in {0, 1}), in their order."""
    return [g for g in groups if has_signal(g.rewards)]
