"""Rollouts that go on from tokens they have: as a request names them, and which weights each token came from."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_brorl.rollout.engine import Request
from megatron_brorl.types import Rollout

Spans = tuple[tuple[int, int], ...]  # (version of the weights, tokens drawn with it), in order


def siblings(request: Request) -> Iterator[Rollout]:
    """Every rollout that the request asks for as it stands: without tokens, or "cut" where it began before."""
    nothing = torch.empty(0, dtype=torch.int64), torch.empty(0)
    begun = {r.index: r for r in request.begun}
    for sibling in range(request.first, request.first + request.n):
        yield begun.get(sibling) or Rollout(sibling, *nothing, "cut")


def extended(spans: Spans, version: int, tokens: int) -> Spans:
    """The spans of a rollout to which `version` has added `tokens`."""
    if not tokens:
        return spans
    if spans and spans[-1][0] == version:
        return (*spans[:-1], (version, spans[-1][1] + tokens))
    return (*spans, (version, tokens))
