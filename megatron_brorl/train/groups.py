"""State, reward and length of every rollout of a step, as tables that all ranks have, and the choice of groups.

All ranks have the same tables, so they take the same decisions, also for groups of which they have no rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_brorl.algo.advantages import has_signal, largest_spread
from megatron_brorl.algo.shaping import repeated_ngrams
from megatron_brorl.config.schema import AlgoConfig
from megatron_brorl.parallel import collectives
from megatron_brorl.types import RowWeight, ScoredRollout

LOST, STOP, LENGTH, CUT = range(4)  # states; no rank has a lost rollout
_STATE = {"stop": STOP, "length": LENGTH, "cut": CUT}  # by Rollout.finish
_NAN = float("nan")

Pieces = Literal["prompts", "siblings"]  # config key algo.mini_batch_of
Index = TypeVar("Index", int, Tensor)  # of one rollout, or of many


@dataclass(frozen=True)
class Outcomes:
    """Tables [groups, N], the same on every rank. The reward of a rollout without a reward is 0.

    Load balance and memory depend on all tokens of a rollout. Metrics and reward shaping count the sampled ones.
    closed and kept are indices of groups in ascending order.
    """

    state: Tensor  # int64
    rewards: Tensor  # float32
    right: Tensor  # bool, whether the response counts as correct
    tokens: Tensor  # int64, all tokens of the response
    sampled: Tensor  # int64, tokens without those of an environment
    repeats: Tensor  # int64, n-grams that had occurred before
    answers: Tensor  # int64, hashes of the final answers (rewards.extract.answer_hash)
    holder: Tensor  # int64, the rank that has the rollout; -1 if it is lost
    closed: list[int] = field(default_factory=list)  # groups without an unfinished ("cut") rollout
    kept: list[int] = field(default_factory=list)  # closed groups to train on

    @property
    def ended(self) -> Tensor:
        """Mask of the rollouts that are complete and have a reward, the survivors: bool [groups, N]."""
        return (self.state == STOP) | (self.state == LENGTH)

    def rewards_of(self, group: int) -> Tensor:
        """Return the rewards [survivors] of a group, in sibling order."""
        return self.rewards[group][self.ended[group]]


def gather_outcomes(rollouts: Sequence[ScoredRollout], groups: int, n: int, ngram: int = 0) -> Outcomes:
    """Return the outcomes of `groups` groups of n rollouts. Collective.

    rollouts: those of this rank; every rollout that is not lost is on exactly one rank. ngram: config key
    shaping.repetition_ngram; 0 counts no repetitions.
    """
    # The fields of Outcomes from state to holder. float64 represents the answer hashes, which are below 2**52, exactly.
    table = torch.zeros(8, groups, n, dtype=torch.float64)
    if rollouts:
        group, index = torch.tensor([(r.group, r.rollout.index) for r in rollouts]).T
        masks = [r.rollout.episode.sampled if r.rollout.episode else None for r in rollouts]
        values = [
            (
                _STATE[r.rollout.finish],
                0.0 if r.rollout.finish == "cut" else r.reward,
                r.right,
                len(r.rollout.token_ids),
                r.rollout.sampled_tokens,
                repeated_ngrams(r.rollout.token_ids, ngram, mask) if ngram else 0,
                r.answer,
                dist.get_rank() + 1,  # 0 for a lost rollout
            )
            for r, mask in zip(rollouts, masks, strict=True)
        ]
        table[:, group, index] = torch.tensor(values, dtype=torch.float64).T

    # The values of each rollout are on one rank and 0 on the others, so the sum is the table of all ranks.
    state, rewards, right, tokens, sampled, repeats, answers, holder = collectives.all_reduce_tensor(table)
    integers = tokens.long(), sampled.long(), repeats.long(), answers.long()
    return Outcomes(state.long(), rewards.float(), right.bool(), *integers, holder.long() - 1)


def mark_unfinished_as_lost(outcomes: Outcomes, groups: Sequence[int]) -> tuple[Outcomes, int]:
    """Mark the "cut" rollouts of the given groups as lost; return the outcomes and the number of these rollouts."""
    unfinished = torch.zeros_like(outcomes.ended)
    unfinished[list(groups)] = outcomes.state[list(groups)] == CUT
    return replace(outcomes, state=outcomes.state.masked_fill(unfinished, LOST)), int(unfinished.sum())


def select_groups(outcomes: Outcomes, dynamic_sampling: bool = True) -> Outcomes:
    """Set `closed` and `kept`. Dynamic sampling keeps the groups whose survivors have different rewards.

    Without dynamic_sampling every closed group with a survivor is kept.
    """
    closed = [g for g, state in enumerate(outcomes.state) if not bool((state == CUT).any())]
    alive = [g for g in closed if len(outcomes.rewards_of(g))]
    kept = [g for g in alive if not dynamic_sampling or has_signal(outcomes.rewards_of(g))]
    return replace(outcomes, closed=closed, kept=kept)


def trained_mask(outcomes: Outcomes, overlong_filter: bool) -> Tensor:
    """Return which rollouts are trained on, bool [groups, N]: the complete ones of kept groups.

    overlong_filter: leave out rollouts that ended at rollout.max_tokens.
    """
    in_kept = torch.zeros_like(outcomes.ended)
    in_kept[outcomes.kept] = True
    return in_kept & ((outcomes.state == STOP) if overlong_filter else outcomes.ended)


@dataclass(frozen=True)
class Subset:
    """The rollouts that a step trains on, and their weights (algo.train_on), as tables [groups, N].

    Of the n_r rollouts of a group with reward r, the subset has the first m_r, each with the weight n_r / m_r. Rollouts
    with equal rewards are exchangeable, so the weighted sum over the subset has the expectation of the sum over all
    rollouts whose reward occurs in it. The divisors of the loss count these rollouts, too.
    """

    mask: Tensor  # bool
    deal_order: Tensor  # int64, deals siblings to mini-batches: their index, or their rank by reward with algo.train_on
    weight: Tensor | None = None  # float64 [groups, N, 3]: RowWeight of the rows in mask; None without algo.train_on

    def weights(self, slots: Sequence[tuple[int, int]]) -> tuple[RowWeight, ...]:
        """Return the weight of each rollout, or () without algo.train_on. slots: group and sibling index of each."""
        table = [] if self.weight is None else self.weight.tolist()
        return tuple(RowWeight(*table[group][sibling]) for group, sibling in slots if table)


def choose_subset(outcomes: Outcomes, algo: AlgoConfig) -> Subset:
    """Return the rollouts to train on: those of trained_mask, or of each group the algo.train_on with most spread.

    outcomes: with the rewards before shaping, like those that select the groups. The same on every rank.
    """
    mask = trained_mask(outcomes, algo.overlong_filter)
    sibling_index = torch.arange(mask.shape[1]).repeat(len(mask), 1)
    if not algo.train_on:
        return Subset(mask, sibling_index)

    chosen = largest_spread(outcomes.rewards, mask, algo.train_on)
    # Number the different rewards of each group in ascending order, and count them: [groups, N].
    ordered, order = outcomes.rewards.masked_fill(~mask, torch.inf).sort(dim=1)
    is_new = torch.zeros_like(mask)
    is_new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    reward_class = torch.zeros_like(sibling_index).scatter(1, order, is_new.long().cumsum(1))
    available, used = (torch.zeros_like(sibling_index).scatter_add(1, reward_class, x.long()) for x in (mask, chosen))

    weight = torch.zeros(*mask.shape, len(RowWeight._fields), dtype=torch.float64)
    tokens = outcomes.sampled * (mask & (used.gather(1, reward_class) > 0))
    chosen_count = chosen.sum(1, keepdim=True).double()
    weight[..., 0] = available.gather(1, reward_class) / used.gather(1, reward_class).double()  # loss
    weight[..., 1] = tokens.sum(1, keepdim=True) / chosen_count  # tokens
    weight[..., 2] = (tokens > 0).sum(1, keepdim=True) / chosen_count  # sequences

    by_reward = reward_class.masked_fill(~chosen, mask.shape[1]).argsort(dim=1, stable=True)
    # Siblings are dealt by reward, so that every mini-batch gets a similar share of each reward.
    reward_rank = torch.zeros_like(sibling_index).scatter(1, by_reward, sibling_index)
    return Subset(chosen, torch.where(chosen, reward_rank, sibling_index), weight)


def mini_batch_of(kept_index: Index, sibling: Index, count: int, of: Pieces) -> Index:
    """Return the index of the mini-batch that contains a rollout of a kept group.

    kept_index: position of the group among the kept groups. sibling: the rollout's index in the group. count: number of
    mini-batches. of = "prompts" assigns whole groups. of = "siblings" gives each optimizer step N / count rollouts of
    every prompt. The rows of an optimizer step do not depend on the number of ranks.
    """
    return (kept_index if of == "prompts" else sibling) % count


def mini_batches(
    slots: Sequence[tuple[int, int]], kept: Sequence[int], count: int, of: Pieces, siblings: Tensor | None = None
) -> list[list[int]]:
    """Return this replica's rows of each mini-batch, see mini_batch_of.

    slots: group and sibling index of each row. siblings: Subset.deal_order, in place of sibling indices.
    """
    kept_index = {group: i for i, group in enumerate(kept)}
    batches: list[list[int]] = [[] for _ in range(count)]
    # A list, because reading one element of a tensor takes microseconds.
    deal_order = None if siblings is None else siblings.tolist()
    for row, (group, index) in enumerate(slots):
        sibling = index if deal_order is None else deal_order[group][index]
        batches[mini_batch_of(kept_index[group], sibling, count, of)].append(row)
    return batches


def group_metrics(outcomes: Outcomes) -> dict[str, float]:
    """Return the metrics of the closed groups. Means over no groups or no rollouts are nan."""
    closed = torch.zeros(len(outcomes.state), 1, dtype=torch.bool)
    closed[outcomes.closed] = True
    counted = outcomes.ended & closed

    right_by_group = [right for g in outcomes.closed if len(right := outcomes.right[g][outcomes.ended[g]])]
    groups = len(outcomes.closed) or _NAN
    count = int(counted.sum()) or _NAN
    # In float64 the mean of float32 rewards does not depend on their order.
    rewards = outcomes.rewards[counted].double()
    return {
        "reward": float(rewards.sum()) / count,
        # Exactly 0 if the rewards are equal.
        "reward_std": _NAN if not len(rewards) else (float(rewards.std(correction=0)) if has_signal(rewards) else 0.0),
        "kept_share": len(outcomes.kept) / groups,
        # Right means a reward of at least reward.correct_at. With partial credit, a group without a right response
        # may still have different rewards.
        "all_right_share": sum(bool(right.all()) for right in right_by_group) / groups,
        "all_wrong_share": sum(not bool(right.any()) for right in right_by_group) / groups,
        "groups_lost": float(sum(len(outcomes.rewards_of(g)) < 2 for g in outcomes.closed)),
        "response_tokens": float(outcomes.sampled[counted].sum()) / count,
        "answered_share": float((outcomes.answers[counted] != 0).sum()) / count,
        "cut_off_share": float((outcomes.state[counted] == LENGTH).sum()) / count,
        "rollouts": float(counted.sum()),
    }
