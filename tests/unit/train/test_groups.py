"""Selection of groups, mini-batches and metrics of a step, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_brorl.train.groups import (
    CUT,
    LOST,
    gather_outcomes,
    group_metrics,
    mark_unfinished_as_lost,
    mini_batches,
    select_groups,
)
from megatron_brorl.types import Rollout, ScoredRollout

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
    cut = reward == "cut"
    tokens = 1 + (group + sibling) % 3
    rollout = Rollout(
        sibling, torch.arange(tokens), torch.zeros(tokens), "cut" if cut else ("stop", "length")[group % 2]
    )
    return ScoredRollout(group, rollout, math.nan if cut else reward, reward == 1.0, (group + sibling) % 4)


def all_rows() -> list[ScoredRollout]:
    return [row(g, i, r) for g, rewards in enumerate(TABLE) for i, r in enumerate(rewards) if r is not None]


@pytest.fixture(scope="module")
def outcomes(processes):
    return gather_outcomes(all_rows(), len(TABLE), 8)


def test_closed_and_kept(outcomes):
    selection = select_groups(outcomes)
    assert selection.closed == [0, 1, 2, 3, 4, 6]
    assert selection.kept == [0, 6]
    closed, lost = mark_unfinished_as_lost(outcomes, [2, 5])
    assert lost == 1
    assert select_groups(closed).kept == [0, 5, 6]
    assert closed.state[5, 2] == LOST
    assert outcomes.state[5, 2] == CUT


def test_metrics_are_over_survivors_of_closed_groups(outcomes):
    got = group_metrics(select_groups(outcomes))
    alive = [(g, i, r) for g, rewards in enumerate(TABLE) if g != 5 for i, r in enumerate(rewards) if r is not None]
    assert len(alive) == 7 + 8 + 7 + 1 + 0 + 6
    mean = sum(r for _, _, r in alive) / 29
    expected = {
        "reward": mean,
        "reward_std": math.sqrt(sum((r - mean) ** 2 for _, _, r in alive) / 29),
        "kept_share": 2 / 6,
        "all_right_share": 2 / 6,  # the one with a single survivor too
        "all_wrong_share": 1 / 6,
        "groups_lost": 2,
        "response_tokens": sum(1 + (g + i) % 3 for g, i, _ in alive) / 29,
        "answered_share": sum((g + i) % 4 > 0 for g, i, _ in alive) / 29,
        "cut_off_share": (8 + 1) / 29,
        "rollouts": 29,
    }
    assert got == pytest.approx(expected)


@pytest.mark.parametrize("of", ["prompts", "siblings"])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_mini_batches_do_not_depend_on_the_distribution(of, count):
    """Every row is trained once, in the same optimizer step for any distribution over replicas."""
    kept = [0, 5, 6]
    rows = [r for r in all_rows() if r.group in kept and r.rollout.finish != "cut"]
    whole = [{(rows[i].group, rows[i].rollout.index) for i in part} for part in mini_batches(rows, kept, count, of)]
    assert sum(map(len, whole)) == len(rows) == len(set().union(*whole))
    for part, batch in enumerate(whole):
        if of == "prompts":
            assert {g for g, _ in batch} == set(kept[part::count])
        else:
            assert {i % count for _, i in batch} <= {part}
    for cut in range(len(rows) + 1):
        halves = [rows[:cut], rows[cut:]]
        for part in range(count):
            spread = [
                [(h[i].group, h[i].rollout.index) for i in mini_batches(h, kept, count, of)[part]] for h in halves
            ]
            assert sorted(spread[0] + spread[1]) == sorted(whole[part])
