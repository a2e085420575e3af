"""Terms of single positions against their definitions on the vocabulary, and expectations by enumeration."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
import torch

from megatron_brorl.theory.token_level import draw_positions, token_level

P = np.array([0.2, 0.5, 0.3])


def every_outcome(n: int, rates: np.ndarray):
    """Return tokens and rewards [outcomes, n] of all outcomes, and their chances. rates: P(reward is 1) by token."""
    tokens = np.array(list(itertools.product(range(3), repeat=n)))
    rewards = np.array(list(itertools.product((0.0, 1.0), repeat=n)))
    token = np.repeat(tokens, len(rewards), axis=0)
    reward = np.tile(rewards, (len(tokens), 1))
    chance = P[token].prod(1) * np.where(reward == 1, rates[token], 1 - rates[token]).prod(1)
    assert chance.sum() == pytest.approx(1)
    return token, reward, chance


def level_per_outcome(token: np.ndarray, reward: np.ndarray):
    """Return token_level of draws [outcomes, n], with each outcome as a separate position."""
    outcomes, n = token.shape
    logits = torch.from_numpy(np.log(P)).expand(outcomes, 3)
    position = torch.arange(outcomes).repeat_interleave(n)
    return token_level(logits, position, torch.from_numpy(token.reshape(-1)), torch.from_numpy(reward.reshape(-1)))


@pytest.mark.parametrize("n", [4, 5])
@pytest.mark.parametrize("rates", [[0.9, 0.1, 0.4], [0.3, 0.3, 0.3]])
def test_the_changes_are_unbiased(n, rates):
    """The mean over all draws is the true change; it is 0 if all tokens have the same success rate."""
    f = np.array(rates)
    token, reward, chance = every_outcome(n, f)
    result = level_per_outcome(token, reward)
    q = float(P @ f)
    policy_change = (n - 1) / n * float(np.square(P * (f - q)).sum())  # the baseline includes the draw: (n - 1) / n
    assert float(chance @ result.policy_gradient.numpy()) == pytest.approx(policy_change, rel=1e-12, abs=1e-15)

    # A step of the surrogate on half of the siblings changes Q by (1/n) sum_j p_j^2 (f_j - Q) (R_j - S_R).
    expected = 0.0
    for x, r, probability in zip(token, reward, chance, strict=True):
        for half in (slice(0, None, 2), slice(1, None, 2)):
            mean = r[half].mean()
            r_by_token = {j: r[half][x[half] == j].mean() - mean for j in set(x[half].tolist())}
            s_r = sum(P[j] * r_j for j, r_j in r_by_token.items())
            change = sum(P[j] ** 2 * (f[j] - q) * (r_j - s_r) for j, r_j in r_by_token.items()) / n
            expected += probability * change / 2
    assert float(chance @ result.sampled.numpy()) == pytest.approx(expected, rel=1e-12, abs=1e-15)
    all_equal = len(set(rates)) == 1
    assert (policy_change == 0) == all_equal
    assert (expected == pytest.approx(0, abs=1e-15)) == all_equal
    assert result.policy_gradient.min() < 0  # An unbiased estimate of 0 has both signs.


def test_changes_are_unknown_with_three_siblings():
    result = level_per_outcome(np.array([[0, 1, 1]]), np.array([[1.0, 0.0, 1.0]]))
    assert torch.isnan(result.policy_gradient).all()
    assert torch.isnan(result.sampled).all()
    assert float(result.siblings) == 3


def test_token_level_needs_a_draw_everywhere():
    zero = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="at least one draw"):
        token_level(torch.zeros(2, 5), position=zero, token=zero, reward=torch.ones(1))


def siblings(seed: int, n: int = 14, depth: int = 5) -> torch.Tensor:
    """Return responses of 0 (lost) to `depth` tokens of a small vocabulary, padded with -1, [n, depth]."""
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 3, (n, depth), generator=rng)
    lengths = torch.randint(0, depth + 1, (n, 1), generator=rng)
    return torch.where(torch.arange(depth) < lengths, tokens, -1)


def prefixes(tokens: torch.Tensor) -> dict[tuple[int, int], tuple[int, ...]]:
    """Return the prefix of every token, by its (sibling, depth)."""
    rows = [[x for x in row if x >= 0] for row in tokens.tolist()]
    return {(i, t): tuple(row[:t]) for i, row in enumerate(rows) for t in range(len(row))}


@pytest.mark.parametrize("environment", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_every_shared_token_once(seed, environment):
    """The middles of equal parts of [0, 1] draw each shared token exactly once, without tokens of an environment."""
    tokens = siblings(seed)
    by_model = (torch.arange(tokens.shape[1]) % 3 != 1) | (not environment)
    sampled = (tokens >= 0) & by_model
    prefix_of = prefixes(tokens)
    siblings_with = Counter(prefix_of.values())
    shared = [index for index, prefix in sorted(prefix_of.items()) if siblings_with[prefix] >= 2 and sampled[index]]
    middles = (torch.arange(len(shared)).double() + 0.5) / len(shared)
    positions = draw_positions(tokens, middles, sampled if environment else None)
    assert positions.shared == len(shared) > 0
    assert list(zip(positions.sibling.tolist(), positions.depth.tolist(), strict=True)) == shared
    for k, index in enumerate(shared):
        together = {sibling for (sibling, _), prefix in prefix_of.items() if prefix == prefix_of[index]}
        assert set(positions.together[k].nonzero().flatten().tolist()) == together


def test_siblings_that_share_nothing():
    for tokens in (torch.full((3, 4), -1), torch.tensor([[5, 6], [-1, -1]])):
        positions = draw_positions(tokens, torch.tensor([0.1, 0.9]).double())
        assert (positions.shared, len(positions.depth)) == (0, 0)
