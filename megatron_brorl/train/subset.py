"""The rollouts that a step trains on, and the weights with which they stand for their whole group (algo.train_on).

The subset S of a group is chosen from the rollouts that would be trained on without algo.train_on. Of the n_r rollouts
with reward r, it has the first m_r, and each has the weight n_r / m_r. Rollouts with equal rewards are exchangeable, so
these are a random sample of them, and the weighted sum over S has the expectation of the sum over all rollouts whose
reward occurs in S. Divisors of the loss count these rollouts and their tokens, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_brorl.algo.subset import largest_spread
from megatron_brorl.config.schema import AlgoConfig
from megatron_brorl.train.groups import Outcomes, trained_mask
from megatron_brorl.types import RowWeight, ScoredRollout


@dataclass(frozen=True)
class Subset:
    """The rollouts that a step trains on, as tables [groups, N]."""

    mask: Tensor  # bool
    # int64: the number by which siblings are dealt to mini-batches (groups.mini_batch_of). With algo.train_on it is the
    # place in the subset ordered by reward, so that each mini-batch has its share of every reward.
    place: Tensor
    weight: Tensor | None = None  # float64 [groups, N, 3]: the fields of RowWeight; None without algo.train_on
    represented_share: float = 1.0  # rollouts whose reward occurs in their group's subset; nan without rollouts

    def weights(self, rollouts: Sequence[ScoredRollout]) -> tuple[RowWeight, ...]:
        """Return the weight of each rollout, or () without algo.train_on."""
        if self.weight is None or not rollouts:
            return ()
        at = [r.group for r in rollouts], [r.rollout.index for r in rollouts]
        return tuple(RowWeight(*row) for row in self.weight[at].tolist())


def choose_subset(outcomes: Outcomes, algo: AlgoConfig) -> Subset:
    """Return the rollouts to train on: those of trained_mask, or of each group the algo.train_on with most spread.

    The rewards are those before shaping, like those that select the groups. The same on every rank.
    """
    mask = trained_mask(outcomes, algo.overlong_filter)
    place = torch.arange(mask.shape[1]).repeat(len(mask), 1)
    if not algo.train_on:
        return Subset(mask, place)

    weight = torch.zeros(*mask.shape, len(RowWeight._fields), dtype=torch.float64)
    candidates = int(mask.sum())
    represented = 0
    for group in outcomes.kept:
        rows = mask[group].nonzero()[:, 0]
        chosen = largest_spread(outcomes.rewards[group, rows], algo.train_on)
        reward_class = outcomes.rewards[group, rows].unique(return_inverse=True)[1]
        own = reward_class[chosen]
        counts = torch.bincount(own, minlength=len(rows))
        tokens = outcomes.sampled[group, rows][counts[reward_class] > 0]
        represented += len(tokens)

        chosen_rows = rows[chosen]
        mask[group] = False
        mask[group, chosen_rows] = True
        place[group, chosen_rows[own.argsort(stable=True)]] = torch.arange(len(own))
        weight[group, chosen_rows, 0] = (torch.bincount(reward_class)[own] / counts[own]).double()
        weight[group, chosen_rows, 1] = float(tokens.sum()) / (len(own) or 1)
        weight[group, chosen_rows, 2] = float((tokens > 0).sum()) / (len(own) or 1)
    return Subset(mask, place, weight, represented / candidates if candidates else float("nan"))
