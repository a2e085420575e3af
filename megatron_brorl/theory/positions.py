"""Where siblings stand at one and the same prefix: the positions at which a group says something about one softmax."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_brorl.theory.token_level import TokenLevel


@dataclass(frozen=True)
class Positions:
    """K positions of one group, drawn at random among its tokens whose prefix at least two siblings share."""

    sibling: Tensor  # [K] int64, one that stands there
    depth: Tensor  # [K] int64, the tokens of the prefix
    together: Tensor  # [K, N] bool, the siblings with that very prefix and a token after it
    shared: int  # tokens to draw among; 0: no position, and K = 0


def draw_positions(tokens: Tensor, uniforms: Tensor) -> Positions:
    """One position per number of `uniforms` [K] in [0, 1), each of the shared tokens equally likely, with replacement.

    tokens [N, D] int64: the first tokens of every sibling's response, -1 where it has ended or the sibling was lost.
    """
    nodes, shared = _prefixes(tokens)
    places = shared.nonzero()
    if not len(places):
        none = torch.zeros(0, dtype=torch.int64)
        return Positions(none, none, torch.zeros(0, len(tokens), dtype=torch.bool), 0)
    sibling, depth = places[(uniforms * len(places)).long()].unbind(1)
    same = nodes[:, depth] == nodes[sibling, depth]
    return Positions(sibling, depth, (same & (tokens[:, depth] >= 0)).t(), len(places))


def _prefixes(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Number of the prefix before each token, equal for equal prefixes of one depth, and where it is shared [N, D]."""
    node = torch.zeros(len(tokens), dtype=torch.int64)
    nodes, shared = torch.zeros_like(tokens), torch.zeros_like(tokens, dtype=torch.bool)
    kinds = int(tokens.max()) + 2  # tokens, and -1
    for t in range(tokens.shape[1]):
        alive = tokens[:, t] >= 0
        nodes[:, t] = node
        shared[:, t] = alive & (torch.bincount(node[alive], minlength=len(tokens)) >= 2)[node]
        if not shared[:, t].any():
            break  # no prefix is shared again
        _, node = torch.unique(node * kinds + tokens[:, t], return_inverse=True)
    return nodes, shared


def draws_at(positions: Positions, tokens: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """position, token and reward of diagnostics.token_level for the group's positions, numbered from 0.

    tokens as in draw_positions; right [N] bool.
    """
    position, sibling = positions.together.nonzero().unbind(1)
    return position, tokens[sibling, positions.depth[position]], right[sibling].double()


def change_of_success(positions: Positions, change: Tensor, found: TokenLevel, survivors: int) -> float:
    """First-order change of a prompt's success rate if every prefix had a softmax of its own, per unit of step size.

    change [K]: of Q at each position, one field of `found`, which holds these positions alone. A plain gradient step on
    the mean over N survivors moves the logits after a prefix that n of them share by n / N of what token_level takes,
    and n / N of them pass there: the sum of (n / N)^2 change over prefixes, which is the mean over siblings of the sum
    of n / N change over their tokens. Tokens whose prefix nobody shares add nothing: they are their own mean; nor do
    those with a change that is unknown (nan), whose prefix fewer than four siblings share.
    """
    if not positions.shared:
        return 0.0
    return float((found.siblings / survivors * change).nan_to_num(0.0).mean()) * positions.shared / survivors
