"""Training jobs for mixtures of experts. Weights and gradients are read without the package's weight stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import tiny
import torch
import torch.distributed as dist
from dist import jobs
from torch import Tensor

from megatron_brorl.config.schema import OptimConfig
from megatron_brorl.families.shape import read_shape
from megatron_brorl.models.weights import names
from megatron_brorl.models.weights.layouts import to_hf
from megatron_brorl.ops.backend import backend
from megatron_brorl.parallel.packing import Packed
from megatron_brorl.train.models import CriticWorker
from megatron_brorl.train.worker import StageOptions, Worker


def full_tensors(worker: Worker, of: Callable[[Tensor], Tensor] = Tensor.detach) -> dict[str, Tensor]:
    """Return of(parameter) for all parameters of this rank, as full Hugging Face tensors, and all adapters."""
    worker.reload()
    grid = worker.grid
    parameters = names.global_parameters(worker.actor)
    found = {name: tensor.clone() for name, tensor in worker.adapter_tensors()}
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


train_steps = partial(jobs.train_steps, read=full_tensors)


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
    step, _ = worker.train([prompts[i] for i in own], [responses[i] for i in own], loss, 1.0, 0.0, own_routes)
    for values in logits.values():
        dist.all_reduce(values, group=grid.groups.cp)  # zeros except for this rank's tokens
    return logits, full_tensors(worker, lambda p: p.main_grad), step.grad_norm


def critic_step(_rank: int, directory: str, parallel: dict[str, Any]) -> tuple[list[Tensor], float, list[Tensor]]:
    """Return the values of a row, which the first replica has, before and after an update, and the gradient norm."""
    grid = jobs.grid_of(**parallel)
    options = StageOptions(60, backend("fused", torch.device("cpu")), distributed_optimizer=True, overlap=True)
    critic = CriticWorker(read_shape(directory), grid, options, OptimConfig(lr=1e-3, eps=1e-3))
    critic.load_hf(directory)
    if grid.last_stage:
        torch.nn.init.constant_(critic.critic.output_layer.weight, 0.1)
    prompts, responses = ([] if grid.dp_rank else rows[5:6] for rows in jobs.rows(1))
    before = critic.values(prompts, responses)
    step, _ = critic.train(prompts, responses, lambda _, values: ((values - 1).square().sum() / 100, None), 1e-3)
    return before, step.grad_norm, critic.values(prompts, responses)


def exact_masters(_rank: int, directory: str, parallel: dict[str, Any]) -> set[str]:
    """Return the experts' tensors whose float32 masters on this rank equal the file, of a model in bfloat16."""
    options = {"dtype": torch.bfloat16, "distributed_optimizer": True}
    worker = jobs.make_worker(directory, parallel, OptimConfig(), **options)
    parameters = names.global_parameters(worker.actor)
    entry_of = {id(parameters[e.megatron]): e for e in names.entries(worker.shape, 1) if e.megatron in parameters}
    stored = tiny.weights(directory)
    found = set()
    for optimizer in worker.optimizer.chained_optimizers:
        for groups in zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True):
            for parameter, master in zip(*groups, strict=True):
                entry = entry_of[id(parameter)]
                flat = torch.cat([stored[name].flatten() for name in entry.hf])
                start = optimizer._get_model_param_range_map(parameter)["param"].start
                if entry.expert is not None and torch.equal(master, flat[start : start + len(master)]):
                    found |= set(entry.hf)
    return found
