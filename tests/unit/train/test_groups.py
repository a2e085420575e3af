"""Selection of groups, mini-batches and metrics of a step, also with tokens of an environment, by hand."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from itertools import combinations, permutations
from types import SimpleNamespace

import pytest
import torch

from megatron_brorl.algo.advantages import largest_spread
from megatron_brorl.config.schema import AlgoConfig, Config, RolloutConfig, ShapingConfig
from megatron_brorl.train.carried_groups import staleness, with_own_tensors
from megatron_brorl.train.diagnostics import MAX_POSITION, _TokenMetrics
from megatron_brorl.train.experience import shape_rewards
from megatron_brorl.train.groups import choose_subset, gather_outcomes, group_metrics, mini_batches, select_groups
from megatron_brorl.types import Episode, Rollout, ScoredRollout, TrainingRollout

# Rewards by sibling, eight each. None: lost; "cut": the rollout continues in the next step.
TABLE = [
    [0.0, 1.0, 0.0, None, 0.0, 0.0, 1.0, 0.0],  # kept with 7 survivors
    [1.0] * 8,
    [0.0] * 7 + [None],
    [None, None, 1.0, *[None] * 5],  # one survivor
    [None] * 8,
    [0.0, 1.0, "cut", None, 0.0, 0.0, 0.0, 1.0],
    [0.25, 0.5, None, None, 0.25, 1.0, 1.0, 0.0],  # kept with 6
]


def row(group: int, sibling: int, reward: float | str) -> ScoredRollout:
    is_cut = reward == "cut"
    tokens = 1 + (group + sibling) % 3
    finish = "cut" if is_cut else ("stop", "length")[group % 2]
    rollout = Rollout(sibling, torch.arange(tokens), torch.zeros(tokens), finish)
    answer = (group + sibling) % 4
    return ScoredRollout(group, rollout, math.nan if is_cut else reward, right=reward == 1.0, answer=answer)


def all_rows() -> list[ScoredRollout]:
    return [row(g, i, r) for g, rewards in enumerate(TABLE) for i, r in enumerate(rewards) if r is not None]


@pytest.fixture(scope="module")
def outcomes(processes):
    return gather_outcomes(all_rows(), len(TABLE), 8)


def test_metrics_are_over_survivors_of_closed_groups(outcomes):
    metrics = group_metrics(select_groups(outcomes))
    closed = [(g, rewards) for g, rewards in enumerate(TABLE) if "cut" not in rewards]
    alive = [(g, i, r) for g, rewards in closed for i, r in enumerate(rewards) if r is not None]
    assert len(alive) == 29  # 7 + 8 + 7 + 1 + 0 + 6
    mean = sum(r for _, _, r in alive) / 29
    expected = {
        "reward": mean,
        "reward_std": math.sqrt(sum((r - mean) ** 2 for _, _, r in alive) / 29),
        "kept_share": 2 / 6,
        "all_right_share": 2 / 6,  # also the group with one survivor
        "all_wrong_share": 1 / 6,
        "groups_lost": 2,
        "response_tokens": sum(1 + (g + i) % 3 for g, i, _ in alive) / 29,
        "answered_share": sum((g + i) % 4 > 0 for g, i, _ in alive) / 29,
        "cut_off_share": (8 + 1) / 29,  # closed groups with an odd index
        "rollouts": 29,
    }
    assert metrics == pytest.approx(expected)


def test_tables_and_metrics_count_sampled_tokens(processes):
    table = [  # token ids, which of them the model sampled, and spans
        ([7, 8, 7, 8, 2], [False, False, True, True, False], ((3, 4), (5, 1))),
        ([4, 4, 4, 9, 4, 4], [True, True, False, False, True, True], ((2, 2), (3, 2), (4, 2))),
        ([5, 6, 5], [True] * 3, ((5, 3),)),
    ]
    rows = []
    for i, (ids, sampled, spans) in enumerate(table):
        mask = torch.tensor([*sampled, True])[:-1]  # a view of a larger tensor, which with_own_tensors copies
        episode = None if all(sampled) else Episode(mask, turns=1)
        rollout = Rollout(i, torch.tensor(ids), torch.zeros(len(ids)), "stop", spans, episode)
        rows.append(ScoredRollout(0, rollout, float(i), right=False))
    outcomes = gather_outcomes(rows, 1, 3, ngram=2)
    assert (outcomes.tokens.tolist(), outcomes.sampled.tolist()) == ([[5, 6, 3]], [[2, 4, 3]])
    # "4 4" is repeated after the observation; "7 8" occurs in the observation first, which does not count.
    assert outcomes.repeats.tolist() == [[0, 1, 0]]
    assert group_metrics(select_groups(outcomes))["response_tokens"] == pytest.approx(3.0)
    config = Config(rollout=RolloutConfig(n=3, max_tokens=4), shaping=ShapingConfig(overlong_tokens=2))
    assert shape_rewards(outcomes, config, step=0).rewards.tolist() == [[0.0, 1.0 - 1.0, 2.0 - 0.5]]
    ages = [3, 3, 4, 4, 2, 2, 1, 1, 1]  # of the sampled tokens, in versions before 6
    assert staleness(rows, version=6) == {"staleness_mean": pytest.approx(sum(ages) / 9), "staleness_max": 4}
    assert with_own_tensors(rows[0]).rollout.episode.sampled.untyped_storage().nbytes() == 5  # one per token

    # The first tokens for the mass balance.
    received = [
        TrainingRollout(0, i, torch.tensor(ids), torch.zeros(len(ids)), right=False, sampled=torch.tensor(sampled))
        for i, (ids, sampled, _) in enumerate(table)
    ]
    collected = SimpleNamespace(outcomes=select_groups(outcomes), rollouts=received)
    metrics = _TokenMetrics(config, 0, collected, worker=SimpleNamespace(grid=processes), sampling=None)
    all_tokens, all_masks = (x[0].tolist() for x in metrics._first_tokens())
    for (ids, sampled, _), tokens, mask in zip(table, all_tokens, all_masks, strict=True):
        padding = MAX_POSITION - len(ids)
        assert (tokens, mask) == (ids + [-1] * padding, sampled + [False] * padding)


SPREADS = [
    [0, 0, 0, 1, 0, 0, 0, 0, 1],
    [0.5, 0, 1, 0.5, 0.25, 0.25, 1, 0, 0.5],
    [-3, 7, 7, 2, 1e6, 2, 1e6 + 0.5, 4, 5],
    [2] * 9,
]


@pytest.mark.parametrize("rewards", SPREADS, ids=str)
@pytest.mark.parametrize("count", [2, 3, 4, 7, 12])
def test_no_subset_has_a_larger_variance(rewards, count):
    # The second group has the same rewards between two that the mask excludes.
    table = torch.tensor([[*rewards, 0, 0], [99, *rewards, -99]], dtype=torch.float32)
    mask = torch.tensor([[True] * 9 + [False] * 2, [False] + [True] * 9 + [False]])
    subsets = largest_spread(table, mask, count)
    assert torch.equal(subsets[0, :9], subsets[1, 1:10])
    assert not (subsets & ~mask).any()
    subset = subsets[0].nonzero()[:, 0].tolist()
    assert len(subset) == min(count, 9)
    best = max(map(statistics.pvariance, combinations(rewards, len(subset))))
    assert statistics.pvariance([rewards[i] for i in subset]) == pytest.approx(best, rel=1e-9, abs=1e-12)
    # Of equal rewards, the first ones are chosen.
    for value, count_of_value in Counter(rewards[i] for i in subset).items():
        with_value = [i for i, r in enumerate(rewards) if r == value]
        assert [i for i in subset if rewards[i] == value] == with_value[:count_of_value]


def chosen(groups, **algo):
    """Return the rows to train on, the subset and the kept groups. groups: (reward, tokens, finish) of each rollout."""
    rows = [
        ScoredRollout(g, Rollout(i, torch.zeros(tokens), torch.zeros(tokens), finish), reward, right=False)
        for g, group in enumerate(groups)
        for i, (reward, tokens, finish) in enumerate(group)
    ]
    outcomes = select_groups(gather_outcomes(rows, len(groups), len(groups[0])))
    subset = choose_subset(outcomes, AlgoConfig(**algo))
    return [r for r in rows if subset.mask[r.group, r.rollout.index]], subset, outcomes.kept


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("rewards", [[0, 1, 0, 0, 1], [0, 0.5, 1, 0, 1]], ids=["all occur", "one is left out"])
def test_the_expected_gradient_is_that_of_all_rollouts_whose_reward_occurs(processes, rewards, filtered):
    """Every order of the rollouts is equally likely. Distinct numbers stand for the gradients of the rollouts."""
    gradients = [3.0, -5.0, 8.0, 1.5, 0.25]
    rollouts = [(reward, 2 + i, "length" if i == 3 else "stop") for i, reward in enumerate(rewards)]
    sums = []
    divisors = set()  # (tokens, sequences)
    for order in permutations(range(5)):
        rows, subset, _ = chosen([[rollouts[i] for i in order]], train_on=3, overlong_filter=filtered)
        weights = subset.weights([(r.group, r.rollout.index) for r in rows])
        sums.append(sum(w.loss * gradients[order[r.rollout.index]] for r, w in zip(rows, weights, strict=True)))
        divisors.add((round(sum(w.tokens for w in weights), 9), round(sum(w.sequences for w in weights), 9)))
        occurring = {r.reward for r in rows}  # the same for every order
    counted = [i for i, (r, _, end) in enumerate(rollouts) if r in occurring and not (filtered and end == "length")]
    assert statistics.mean(sums) == pytest.approx(sum(gradients[i] for i in counted), rel=1e-12)
    assert divisors == {(sum(rollouts[i][1] for i in counted), len(counted))}


@pytest.mark.parametrize("count", [2, 3])
def test_sibling_mini_batches_have_equal_shares_of_each_reward(processes, count):
    rng = torch.Generator().manual_seed(0)
    groups = [[(float(torch.rand((), generator=rng) < p), 3, "stop") for _ in range(64)] for p in (0.1, 0.5, 0.9)]
    rows, subset, kept = chosen(groups, train_on=18)
    slots = [(r.group, r.rollout.index) for r in rows]
    batches = mini_batches(slots, kept, count, "siblings", subset.deal_order)
    for group in range(3):
        counters = [Counter(rows[i].reward for i in batch if rows[i].group == group) for batch in batches]
        assert [counter.total() for counter in counters] == [18 // count] * count
        for reward in (0.0, 1.0):
            counts = [counter[reward] for counter in counters]
            assert max(counts) - min(counts) <= 1
