"""Training jobs for mixtures of experts. Weights and gradients are read without the package's weight stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from dist import jobs
from torch import Tensor

from megatron_brorl.config.schema import OptimConfig
from megatron_brorl.models.weights import names
from megatron_brorl.models.weights.layouts import to_hf
from megatron_brorl.parallel.packing import Packed
from megatron_brorl.train.worker import Worker


def full_tensors(worker: Worker, of: Callable[[Tensor], Tensor] = Tensor.detach) -> dict[str, Tensor]:
    """Return of(parameter) for all parameters of this rank, as full Hugging Face tensors."""
    worker.reload()
    grid = worker.grid
    parameters = names.global_parameters(worker.actor)
    found: dict[str, Tensor] = {}
    for entry in names.entries(worker.shape, grid.pp_size):
        if entry.is_on(grid, worker.shape.experts):
            own = of(parameters[entry.megatron]).contiguous()
            parts = [own]
            if entry.layout != "replicated":
                parts = [torch.empty_like(own) for _ in range(grid.tp_size)]
                dist.all_gather(parts, own, group=grid.groups.tp)
            full = to_hf(entry, parts, worker.shape.kv_heads)
            found |= {name: x.clone() for name, x in zip(entry.hf, full, strict=True)}
    return found


def gradients(
    _rank: int, directory: str, parallel: dict[str, Any], options: dict[str, Any]
) -> tuple[dict[int, Tensor], dict[str, Tensor], float]:
    """Return logits [G, V] of every row, the gradient of the mean of -log p, and its norm.

    The option share is the part of the rows that the first replica trains on; the others share the rest equally.
    """
    share = options.pop("share", None)
    worker = jobs.make_worker(directory, parallel, OptimConfig(clip_grad=0.0), **options)
    prompts, responses = jobs.rows(1)
    tokens = sum(map(len, responses))
    grid = worker.grid
    ends = [round(len(prompts) * i / grid.dp_size) for i in range(grid.dp_size + 1)]
    if share is not None:
        ends[1:-1] = [round(len(prompts) * share)] * (grid.dp_size - 1)
    own = range(ends[grid.dp_rank], ends[grid.dp_rank + 1])
    logits: dict[int, Tensor] = {}

    def loss(batch: Packed, head: Any) -> tuple[Tensor, None]:
        found = batch.split(head.logits(torch.arange(len(head.hidden))).detach())
        logits.update((own[row], values) for row, values in found)
        return -head.log_probs()[0].sum() / tokens, None

    step, _ = worker.train([prompts[i] for i in own], [responses[i] for i in own], loss, 1.0, 0.0)
    for values in logits.values():
        dist.all_reduce(values, group=grid.groups.cp)  # zeros except for this rank's tokens
    return logits, full_tensors(worker, lambda p: p.main_grad), step.grad_norm


train_steps = partial(jobs.train_steps, read=full_tensors)
