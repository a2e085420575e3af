"""algo.train_on: the subset against brute force, its expectation over all orders, and a step against a float64 loop."""

from __future__ import annotations

import statistics
from collections import Counter
from itertools import combinations, permutations

import fakes
import pytest
import torch
from by_hand import responses, update
from dist.steps import configured, make_trainer

from megatron_brorl.algo.subset import largest_spread
from megatron_brorl.config.schema import AlgoConfig
from megatron_brorl.train.groups import gather_outcomes, mini_batches, select_groups
from megatron_brorl.train.subset import choose_subset
from megatron_brorl.types import Rollout, ScoredRollout

REWARDS = [
    [0, 0, 0, 1, 0, 0, 0, 0, 1],
    [1, 1, 1, 0, 1, 1, 1, 1, 1],
    [0.5, 0, 1, 0.5, 0.25, 0.25, 1, 0, 0.5],
    [-3, 7, 7, 2, 1e6, 2, 1e6 + 0.5, 4, 5],
    [0.3, 0.1, 0.7, 0.2, 0.5, 0.9, 0.4, 0.6, 0.8],
    [2] * 9,
]


@pytest.mark.parametrize("rewards", REWARDS, ids=str)
@pytest.mark.parametrize("count", [2, 3, 4, 7, 9, 12])
def test_no_subset_has_a_larger_variance(rewards, count):
    found = largest_spread(torch.tensor(rewards, dtype=torch.float32), count).nonzero()[:, 0].tolist()
    assert len(found) == min(count, 9)
    best = max(statistics.pvariance([rewards[i] for i in s]) for s in combinations(range(9), len(found)))
    assert statistics.pvariance([rewards[i] for i in found]) == pytest.approx(best, rel=1e-9, abs=1e-12)
    for value, chosen in Counter(rewards[i] for i in found).items():
        assert [i for i in found if rewards[i] == value] == [i for i, r in enumerate(rewards) if r == value][:chosen]


def table(groups: list[list[tuple[float, int, str]]]):
    """Return the outcomes of groups of (reward, tokens, finish)."""
    rows = [
        ScoredRollout(g, Rollout(i, torch.zeros(tokens), torch.zeros(tokens), finish), reward, reward == 1)
        for g, group in enumerate(groups)
        for i, (reward, tokens, finish) in enumerate(group)
    ]
    return rows, select_groups(gather_outcomes(rows, len(groups), max(map(len, groups))))


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("rewards", [[0, 1, 0, 0, 1], [0, 0.5, 1, 0, 1]], ids=["all occur", "some are left out"])
@pytest.mark.parametrize("aggregation", ["tokens", "sequences"])
def test_the_expected_gradient_is_that_of_all_rollouts_whose_reward_occurs(processes, rewards, filtered, aggregation):
    """Every order of the rollouts is equally likely. The gradient of each rollout is a number of its own."""
    gradients = dict(zip(range(5), [3.0, -5.0, 8.0, 1.5, 0.25], strict=True))
    facts = [(reward, 2 + i, "length" if i == 3 else "stop") for i, reward in enumerate(rewards)]
    algo = AlgoConfig(train_on=3, overlong_filter=filtered)
    found, expected = [], set()
    for order in permutations(range(5)):
        rows, outcomes = table([[facts[i] for i in order]])
        subset = choose_subset(outcomes, algo)
        taken = [r for r in rows if subset.mask[0, r.rollout.index]]
        weights = subset.weights(taken)
        divisor = sum(getattr(w, aggregation) for w in weights)
        found.append(
            sum(w.loss * gradients[order[r.rollout.index]] for r, w in zip(taken, weights, strict=True)) / divisor
        )

        occur = {r.reward for r in taken}
        alike = [i for i, (r, _, finish) in enumerate(facts) if r in occur and not (filtered and finish == "length")]
        size = sum(facts[i][1] for i in alike) if aggregation == "tokens" else len(alike)
        expected.add(sum(gradients[i] for i in alike) / size)
        assert subset.represented_share == len(alike) / (4 if filtered else 5)
    assert len(expected) == 1
    assert filtered or len(set(found)) > 1
    assert statistics.mean(found) == pytest.approx(expected.pop(), rel=1e-12)


@pytest.mark.parametrize("count", [2, 3])
def test_sibling_mini_batches_have_equal_shares_of_each_reward(processes, count):
    g = torch.Generator().manual_seed(0)
    groups = [[(float(torch.rand((), generator=g) < p), 3, "stop") for _ in range(64)] for p in (0.1, 0.5, 0.9)]
    rows, outcomes = table(groups)
    subset = choose_subset(outcomes, AlgoConfig(train_on=18))
    taken = [r for r in rows if subset.mask[r.group, r.rollout.index]]
    batches = mini_batches(taken, outcomes.kept, count, "siblings", subset.place)
    for group in range(3):
        parts = [Counter(taken[i].reward for i in batch if taken[i].group == group) for batch in batches]
        assert [p.total() for p in parts] == [18 // count] * count
        assert all(max(p[r] for p in parts) - min(p[r] for p in parts) <= 1 for r in (0.0, 1.0))


class Shares(fakes.Pool):
    """Reward the share of even tokens in quarters, so that some rewards are not in the subset."""

    def judge(self, answer: str) -> float:
        ids = [int(word) for word in answer.split()]
        return round(4 * sum(i % 2 == 0 for i in ids) / max(len(ids), 1)) / 4


@pytest.mark.parametrize("judge", [fakes.Pool(), Shares()], ids=["0 and 1", "partial credit"])
def test_the_gradient_of_a_step_equals_a_float64_loop(processes, model, judge):
    n, tokens, k = 48, 12, 7
    config = configured({"rollout": {"n": n, "prompts": 2}, "algo": {"train_on": k}, "reward": {"cut_off_factor": 1.0}})
    trainer = make_trainer(model[0], processes, config, fakes.Engine())
    object.__setattr__(trainer.runner, "pool", judge)
    trainer.sync_weights()
    values, _ = trainer.train_step()

    groups, factors, represented = [], {}, 0
    for prompt in fakes.prompts(2):
        rows = responses(config.run.seed, prompt, n, tokens)
        texts = [" ".join(map(str, row[:-1] if row[-1] == fakes.STOP else row)) for row in rows]
        rewards = [judge.judge(text) for text in texts]
        groups.append((prompt, rows, rewards))
        ranked = sorted(rewards)
        subsets = [ranked[: k - i] + ranked[n - i :] for i in range(k + 1)]
        occur = Counter(max(subsets, key=statistics.pvariance))
        alike = [i for i in range(n) if rewards[i] in occur]
        represented += len(alike)
        for reward, count in occur.items():
            chosen = [i for i in range(n) if rewards[i] == reward]
            for i in chosen[:count]:
                factors[prompt.id, i] = len(chosen) / count, sum(len(rows[j]) for j in alike) / k
    loss, norm, trained = update(model[1], groups, config.algo.is_cap, factors=factors)
    assert values["trained_tokens"] == trained
    assert values["represented_share"] == represented / (2 * n)
    assert (represented < 2 * n) == isinstance(judge, Shares)
    assert values["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-7)
    assert values["grad_norm"] == pytest.approx(norm, rel=1e-4)
