"""Inner products of gradients whose parts lie on several ranks."""

from __future__ import annotations

from typing import Any

import torch
from dist.jobs import make_worker, rows

from megatron_brorl.config.schema import OptimConfig
from megatron_brorl.train.gradient_noise import _inner_products


def weights(count: int) -> torch.Tensor:
    """Of each row in two losses [2, rows]."""
    return torch.randn(2, count, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def products(_rank: int, directory: str, parallel: dict[str, Any], options: dict[str, Any]) -> list[float]:
    """<a, b>, <a, a>, <b, b> of the gradients of two weighted sums of the rows' log-probabilities."""
    worker = make_worker(directory, parallel, OptimConfig(), **options)
    prompts, responses = rows(2)
    # The first replica has all rows of the second loss, and the others none.
    count, data, at = len(prompts), worker.grid.data, worker.grid.dp_rank
    shares = slice(count * at // data, count * (at + 1) // data), slice(0, 0 if at else count)
    found = []
    for own, of_rows in zip(shares, weights(count), strict=True):

        def loss(batch: Any, head: Any, own: slice = own, of_rows: torch.Tensor = of_rows) -> Any:
            log_probs = head.log_probs()[0]
            return (log_probs * batch.repeat(of_rows[own]).to(log_probs)).sum(), None

        gradient, ranks = worker.gradient(prompts[own], responses[own], loss, 0.9)
        found.append([g.clone() for g in gradient])
    a, b = found
    return _inner_products([(a, b), (a, a), (b, b)], ranks)
