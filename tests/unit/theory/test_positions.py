"""Positions that siblings share, against prefixes as tuples; what a prompt gains, against the sum over its prefixes."""

from __future__ import annotations

from collections import Counter

import cross_fitting
import numpy as np
import pytest
import torch

from megatron_brorl.theory.positions import change_of_success, draw_positions, draws_at
from megatron_brorl.theory.token_level import token_level

VOCABULARY = 3


def siblings(seed: int, n: int = 14, depth: int = 5) -> torch.Tensor:
    """Responses of 0 (lost) to `depth` tokens of a small vocabulary, padded by -1."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (n, depth), generator=g)
    lengths = torch.randint(0, depth + 1, (n, 1), generator=g)
    return torch.where(torch.arange(depth) < lengths, tokens, -1)


def prefixes(tokens: torch.Tensor) -> dict[tuple[int, int], tuple[int, ...]]:
    """The prefix of every token (sibling, depth)."""
    rows = [[x for x in row if x >= 0] for row in tokens.tolist()]
    return {(i, t): tuple(row[:t]) for i, row in enumerate(rows) for t in range(len(row))}


@pytest.mark.parametrize("seed", range(6))
def test_every_shared_token_once(seed):
    """Numbers in the middle of equal cells draw each shared token exactly once."""
    tokens = siblings(seed)
    found = prefixes(tokens)
    count = Counter(found.values())
    shared = [place for place, prefix in sorted(found.items()) if count[prefix] >= 2]
    middles = (torch.arange(len(shared)).double() + 0.5) / len(shared)
    drawn = draw_positions(tokens, middles)
    assert drawn.shared == len(shared) > 0
    assert list(zip(drawn.sibling.tolist(), drawn.depth.tolist(), strict=True)) == shared
    for k, place in enumerate(shared):
        there = {i for (i, t), prefix in found.items() if (t, prefix) == (place[1], found[place])}
        assert set(drawn.together[k].nonzero().flatten().tolist()) == there


@pytest.mark.parametrize("seed", range(6))
def test_a_prompt_s_change_is_the_sum_over_its_prefixes(seed):
    """(n / N)^2 times the change at each prefix, each a softmax of its own with known logits."""
    tokens = siblings(seed)
    right = torch.rand(len(tokens), generator=torch.Generator().manual_seed(seed)) < 0.5
    found = prefixes(tokens)
    survivors = len({i for i, _ in found})
    logits = {
        p: torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(hash(p) % 999)) for p in found.values()
    }
    expected = 0.0
    for prefix, n in Counter(found.values()).items():
        draws = [(int(tokens[i, t]), float(right[i])) for (i, t), p in found.items() if p == prefix]
        if n >= 4:  # of fewer nothing is known
            token, reward = (np.array(column) for column in zip(*draws, strict=True))
            p = logits[prefix].double().softmax(-1).numpy()
            expected += (n / survivors) ** 2 * cross_fitting.changes(token, reward, p)[0]
    count = sum(n for n in Counter(found.values()).values() if n >= 2)
    drawn = draw_positions(tokens, (torch.arange(count).double() + 0.5) / count)
    rows = [logits[found[i, t]] for i, t in zip(drawn.sibling.tolist(), drawn.depth.tolist(), strict=True)]
    level = token_level(torch.stack(rows), *draws_at(drawn, tokens, right))
    assert change_of_success(drawn, level.policy_gradient, level, survivors) == pytest.approx(
        expected, rel=1e-9, abs=1e-15
    )


def test_siblings_that_share_nothing():
    for tokens in (torch.full((3, 4), -1), torch.tensor([[5, 6], [-1, -1]])):
        drawn = draw_positions(tokens, torch.tensor([0.1, 0.9]).double())
        assert (drawn.shared, len(drawn.depth)) == (0, 0)
        level = token_level(torch.zeros(0, 7), *draws_at(drawn, tokens, torch.ones(len(tokens), dtype=torch.bool)))
        assert change_of_success(drawn, level.sampled, level, 1) == 0
