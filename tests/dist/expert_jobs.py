"""A training job for mixtures of experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from dist import jobs
from torch import Tensor

from megatron_brorl.config.schema import OptimConfig
from megatron_brorl.parallel.packing import Packed


def gradients(
    _rank: int, directory: str, parallel: dict[str, Any], options: dict[str, Any]
) -> tuple[dict[int, Tensor], dict[str, Tensor], float]:
    """Return logits [G, V] of this replica's rows, the gradient of the mean of -log p, and its norm.

    The option first is the number of rows of the first replica; the last one has the others. The option routes has the
    experts of every row, or None.
    """
    first = options.pop("first", 12)
    routes = options.pop("routes")
    worker = jobs.make_worker(directory, parallel, OptimConfig(clip_grad=0.0), **options)
    prompts, responses = jobs.rows(1)
    grid = worker.grid
    ends = [0, *[first] * (grid.dp_size - 1), len(prompts)]
    own = range(ends[grid.dp_rank], ends[grid.dp_rank + 1])
    logits: dict[int, Tensor] = {}

    def loss(batch: Packed, head: Any) -> tuple[Tensor, None]:
        found = batch.split(head.logits(torch.arange(len(head.hidden))).detach())
        logits.update((own[row], values) for row, values in found)
        return -head.log_probs()[0].sum() / sum(map(len, responses)), None

    own_routes = routes and [routes[i] for i in own]
    step, _ = worker.train(
        [prompts[i] for i in own], [responses[i] for i in own], loss, worker.head(1.0), 0.0, own_routes
    )
    for values in logits.values():
        dist.all_reduce(values, group=grid.groups.cp)  # zeros except for this rank's tokens
    with torch.no_grad():
        for p in worker.actor.parameters():
            p.copy_(p.main_grad)
    return logits, jobs.streamed(worker), step.grad_norm
