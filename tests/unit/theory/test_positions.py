"""Positions that siblings share, against prefixes as tuples; what a prompt gains, against the sum over its prefixes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from megatron_brorl.theory.positions import draw_positions

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


def test_siblings_that_share_nothing():
    for tokens in (torch.full((3, 4), -1), torch.tensor([[5, 6], [-1, -1]])):
        drawn = draw_positions(tokens, torch.tensor([0.1, 0.9]).double())
        assert (drawn.shared, len(drawn.depth)) == (0, 0)
