"""Counts and tables of a step whose rollouts have tokens of an environment, by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_brorl.config.schema import Config, RolloutConfig, ShapingConfig
from megatron_brorl.train.carried_groups import staleness, with_own_tensors
from megatron_brorl.train.diagnostics import MAX_POSITION, _TokenMetrics
from megatron_brorl.train.experience import shape_rewards
from megatron_brorl.train.groups import gather_outcomes, group_metrics, select_groups
from megatron_brorl.types import Episode, Rollout, ScoredRollout

ROWS = [  # ids, which of them the model sampled, and spans
    ([7, 8, 7, 8, 2], [False, False, True, True, False], ((3, 4), (5, 1))),
    ([4, 4, 4, 9, 4, 4], [True, True, False, False, True, True], ((2, 2), (3, 2), (4, 2))),
    ([5, 6, 5], [True] * 3, ((5, 3),)),
]


def scored():
    rows = []
    for i, (ids, sampled, spans) in enumerate(ROWS):
        episode = None if all(sampled) else Episode(torch.tensor(sampled), 1)
        rollout = Rollout(i, torch.tensor(ids), torch.zeros(len(ids)), "stop", spans, episode)
        rows.append(ScoredRollout(0, rollout, float(i), False))
    return rows


def test_tables_and_metrics_count_sampled_tokens(processes):
    outcomes = gather_outcomes(scored(), 1, 3, ngram=2)
    assert (outcomes.tokens.tolist(), outcomes.sampled.tolist()) == ([[5, 6, 3]], [[2, 4, 3]])
    # "4 4" is repeated after the observation; "7 8" occurs in the observation first, which does not count.
    assert outcomes.repeats.tolist() == [[0, 1, 0]]
    assert group_metrics(select_groups(outcomes))["response_tokens"] == pytest.approx(3.0)
    config = Config(rollout=RolloutConfig(max_tokens=4), shaping=ShapingConfig(overlong_tokens=2))
    assert shape_rewards(outcomes, config, 0).rewards.tolist() == [[0.0, 1.0 - 1.0, 2.0 - 0.5]]
    ages = [3, 3, 4, 4, 2, 2, 1, 1, 1]
    assert staleness(scored(), 6) == {"staleness_mean": pytest.approx(sum(ages) / 9), "staleness_max": 4}
    whole = torch.ones(9) > 0
    view = Rollout(0, torch.arange(4), torch.zeros(4), "cut", episode=Episode(whole[:4], 1))
    assert with_own_tensors(ScoredRollout(0, view, 0.0, False)).rollout.episode.sampled.untyped_storage().nbytes() == 4


def test_first_tokens_of_the_mass_balance(processes):
    collected = SimpleNamespace(outcomes=select_groups(gather_outcomes(scored(), 1, 3)), rollouts=scored())
    worker = SimpleNamespace(grid=processes)
    tokens, sampled = _TokenMetrics(Config(rollout=RolloutConfig(n=3)), 0, collected, worker, None)._first_tokens()
    for i, (ids, own, _) in enumerate(ROWS):
        rest = MAX_POSITION - len(ids)
        assert (tokens[0, i].tolist(), sampled[0, i].tolist()) == (ids + [-1] * rest, own + [False] * rest)
