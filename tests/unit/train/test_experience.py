"""From rewards to the advantages of tokens, against the equations in Python's own floats."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
import torch

from megatron_brorl.config.schema import AlgoConfig
from megatron_brorl.ops.backend import backend
from megatron_brorl.train.experience import rollout_advantages, token_advantages
from megatron_brorl.train.groups import LENGTH, LOST, STOP, Outcomes
from megatron_brorl.types import Prompt, PromptGroup

LENGTHS = [3, 1, 5, 2]  # tokens of each response
REWARDS_OF_ROWS = [0.75, -1.5, 0.25, 1.0]
OPS = [backend(name, torch.device("cpu")) for name in ("fused", "reference")]


@pytest.fixture(scope="module", autouse=True)
def replicas(processes):
    return processes.groups.dp


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("kind", ["gae", "grpo", "maxrl", "pass_at_k", "reinforce_pp_baseline"])
def test_kl_in_the_reward(replicas, ops, kind):
    """r_t = -beta KL_t, plus the group advantage at the last token. A_t sums r from t on. Only some kinds whiten it."""
    rng = torch.Generator().manual_seed(1)
    kl = [torch.randn(n, generator=rng) for n in LENGTHS]
    algo = AlgoConfig(advantage=kind, kl_coef=0.3, kl_in="reward", kl_estimator="k1")
    values = [torch.zeros(n) for n in LENGTHS] if kind == "gae" else None
    advantages, returns, _ = token_advantages(torch.tensor(REWARDS_OF_ROWS), LENGTHS, values, kl, algo, ops, replicas)
    pairs = zip(REWARDS_OF_ROWS, kl, strict=True)
    raw = [[r - 0.3 * sum(kl_row.tolist()[t:]) for t in range(len(kl_row))] for r, kl_row in pairs]
    flat = [a for row in raw for a in row]
    mean, std = (0.0, 1.0) if kind in ("grpo", "maxrl") else (statistics.fmean(flat), statistics.pstdev(flat))
    for advantage_row, row in zip(advantages, raw, strict=True):
        assert advantage_row.tolist() == pytest.approx([(a - mean) / std for a in row], abs=1e-5)
    assert (returns is None) == (kind != "gae")


@pytest.mark.parametrize("ops", OPS)
def test_no_rows_and_equal_returns(replicas, ops):
    """A replica without rows takes part; equal returns give advantages of 0 and no explained variance."""
    settings = {"kl": None, "algo": AlgoConfig(advantage="gae"), "ops": ops, "replicas": replicas}
    advantages, returns, _ = token_advantages(torch.zeros(0), [], values=[], **settings)
    assert len(advantages) == len(returns) == 0
    values = [torch.zeros(2), torch.zeros(3)]
    advantages, _, metrics = token_advantages(torch.ones(2), [2, 3], values, **settings)
    assert torch.count_nonzero(torch.cat(advantages)) == 0
    assert math.isnan(metrics["explained_variance"])


GROUPS = [PromptGroup(Prompt(f"row{i}", "", (1,), "4", "exact"), round=0, index=i) for i in range(3)]
REWARDS = [[0.0, 1.0, None, 0.0], [1.0] * 4, [0.25, 0.5, 0.25, None]]


def outcomes():
    state = [[LOST if r is None else (STOP, LENGTH)[i % 2] for i, r in enumerate(row)] for row in REWARDS]
    return table_of(torch.tensor(state), torch.tensor([[r or 0.0 for r in row] for row in REWARDS]))


def table_of(state, rewards):
    """Return outcomes with these tables; rewards of 1 are right, and all groups are kept."""
    ones, zeros = torch.ones_like(state), torch.zeros_like(state)
    kept = list(range(len(state)))
    return Outcomes(state, rewards, rewards == 1, ones, ones, repeats=zeros, answers=zeros, holder=zeros, kept=kept)


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("kind", ["grpo", "maxrl", "pass_at_k", "reinforce_pp_baseline"])
def test_rollout_advantages(ops, kind):
    """Mixed, all-right and partly-right groups with lost siblings."""
    algo = AlgoConfig(advantage=kind, pass_k=2 if kind == "pass_at_k" else 0)
    advantages = rollout_advantages(outcomes(), GROUPS, algo, ops)
    survivors = [[r for r in row if r is not None] for row in REWARDS]
    centred = [[r - statistics.fmean(row) for r in row] for row in survivors]
    pairs = list(zip(centred, survivors, strict=True))
    if kind == "grpo":
        expected = [[x / (statistics.stdev(rewards) + 1e-6) for x in row] for row, rewards in pairs]
    elif kind == "maxrl":
        expected = [[x / statistics.fmean(rewards) for x in row] for row, rewards in pairs]
    elif kind == "pass_at_k":
        expected = [[-1, 2, -1], [0] * 4, [0] * 3]  # 2 (1 - 0): pass@2 is 0 without the right rollout
    else:
        expected = centred
    if kind in ("pass_at_k", "reinforce_pp_baseline"):
        flat = [x for row in expected for x in row]
        mean = statistics.fmean(flat)
        std = statistics.pstdev(flat)
        kl_algo = replace(algo, kl_coef=0.1, kl_in="reward")  # With these settings token_advantages whitens instead.
        unwhitened = rollout_advantages(outcomes(), GROUPS, kl_algo, ops)
        assert unwhitened[outcomes().ended].tolist() == pytest.approx(flat, abs=1e-6)
        expected = [[(x - mean) / std for x in row] for row in expected]
    for row, rewards, expected_row in zip(advantages.tolist(), REWARDS, expected, strict=True):
        survivor_values = iter(expected_row)
        assert row == pytest.approx([0.0 if r is None else next(survivor_values) for r in rewards], abs=1e-6, rel=1e-5)


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("kind", ["grpo", "reinforce_pp_baseline"])
def test_rewards_at_the_mean_of_their_group_have_no_advantage(ops, kind):
    """The second reward of a group is its mean in decimals, but not in float32. Its advantage must be exactly 0."""
    groups = [(0.1, 0.2, 0.3), (-1.1, 0.3, 1.7), (100.1, 100.2, 100.3), (1e-3, 2e-3, 3e-3), (0.95,) * 3, (0.1,) * 3]
    rewards = torch.tensor(groups)
    table = table_of(torch.full((6, 3), STOP), rewards)
    advantages = rollout_advantages(table, GROUPS * 2, AlgoConfig(advantage=kind), ops)
    assert advantages.sign().tolist() == [[-1, 0, 1]] * 4 + [[0] * 3] * 2


def test_rollouts_with_a_critic_have_their_rewards():
    advantages = rollout_advantages(outcomes(), GROUPS, AlgoConfig(advantage="gae"), OPS[0])
    assert advantages.tolist() == [[r or 0.0 for r in row] for row in REWARDS]
