"""Positions at which several siblings of a group share their prefix, so that they drew from the same softmax."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Positions:
    """K positions of one group, drawn at random from its tokens whose prefix at least two siblings share."""

    sibling: Tensor  # [K] int64, one sibling with the prefix
    depth: Tensor  # [K] int64, length of the prefix in tokens
    together: Tensor  # [K, N] bool, the siblings with exactly that prefix and a token after it
    shared: int  # tokens with a shared prefix; if 0, K is 0


def draw_positions(tokens: Tensor, uniforms: Tensor) -> Positions:
    """Draw one position per number of `uniforms` [K] in [0, 1), uniformly from the shared tokens, with replacement.

    tokens [N, D] int64: the first tokens of each sibling's response, -1 after its end and for a lost sibling.
    """
    nodes, shared = _prefixes(tokens)
    candidates = shared.nonzero()
    if not len(candidates):
        none = torch.zeros(0, dtype=torch.int64)
        return Positions(none, none, torch.zeros(0, len(tokens), dtype=torch.bool), 0)
    sibling, depth = candidates[(uniforms * len(candidates)).long()].unbind(1)
    same = nodes[:, depth] == nodes[sibling, depth]
    return Positions(sibling, depth, (same & (tokens[:, depth] >= 0)).t(), len(candidates))


def _prefixes(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return a number for the prefix before each token, [N, D], and a mask [N, D] of the shared ones."""
    node = torch.zeros(len(tokens), dtype=torch.int64)
    nodes, shared = torch.zeros_like(tokens), torch.zeros_like(tokens, dtype=torch.bool)
    kinds = int(tokens.max()) + 2  # the tokens and -1
    for t in range(tokens.shape[1]):
        alive = tokens[:, t] >= 0
        nodes[:, t] = node
        shared[:, t] = alive & (torch.bincount(node[alive], minlength=len(tokens)) >= 2)[node]
        if not shared[:, t].any():
            break  # A longer prefix cannot be shared either.
        _, node = torch.unique(node * kinds + tokens[:, t], return_inverse=True)
    return nodes, shared


def draws_at(positions: Positions, tokens: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the arguments position, token and reward of `token_level` for one group; positions count from 0.

    tokens: as in `draw_positions`; right [N] bool.
    """
    position, sibling = positions.together.nonzero().unbind(1)
    return position, tokens[sibling, positions.depth[position]], right[sibling].double()
