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
from megatron_brorl.families.shape import read_shape
from megatron_brorl.models.critic import body
from megatron_brorl.models.weights import names
from megatron_brorl.models.weights.layouts import to_hf
from megatron_brorl.ops.backend import backend
from megatron_brorl.parallel.packing import Packed
from megatron_brorl.train.models import CriticWorker
from megatron_brorl.train.worker import Stage, StageOptions, Worker


def full_tensors(stage: Stage, of: Callable[[Tensor], Tensor] = Tensor.detach) -> dict[str, Tensor]:
    """Return of(parameter) for all parameters of this rank, as full Hugging Face tensors."""
    stage.reload()
    grid = stage.grid
    parameters = names.global_parameters(stage.module)
    found: dict[str, Tensor] = {}
    for entry in names.entries(stage.shape if isinstance(stage, Worker) else body(stage.shape), grid.pp_size):
        if entry.is_on(grid, stage.shape.experts):
            own = of(parameters[entry.megatron]).contiguous()
            parts = [own]
            if entry.layout != "replicated":
                parts = [torch.empty_like(own) for _ in range(grid.tp_size)]
                dist.all_gather(parts, own, group=grid.groups.tp)
            full = to_hf(entry, parts, stage.shape.kv_heads)
            found |= {name: x.clone() for name, x in zip(entry.hf, full, strict=True)}
    return found


def gradients(
    _rank: int, directory: str, parallel: dict[str, Any], options: dict[str, Any]
) -> tuple[dict[int, Tensor], dict[int, Tensor], dict[str, Tensor], float]:
    """Return log-probs [G] and logits [G, V] of this replica's rows, the gradient of the mean of -log p, and its norm.

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
    own_rows = [prompts[i] for i in own], [responses[i] for i in own]
    scored = dict(zip(own, worker.log_probs(*own_rows, 1.0), strict=True))
    logits: dict[int, Tensor] = {}

    def loss(batch: Packed, head: Any) -> tuple[Tensor, None]:
        found = batch.split(head.logits(torch.arange(len(head.hidden))).detach())
        logits.update((own[row], values) for row, values in found)
        return -head.log_probs()[0].sum() / tokens, None

    step, _ = worker.train(*own_rows, loss, 1.0, 0.0)
    for values in logits.values():
        dist.all_reduce(values, group=grid.groups.cp)  # zeros except for this rank's tokens
    return scored, logits, full_tensors(worker, lambda p: p.main_grad), step.grad_norm


train_steps = partial(jobs.train_steps, read=full_tensors)


def adapters(worker: Worker) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in worker.adapter_tensors()}


train_adapters = partial(jobs.train_steps, read=adapters)


def critic_step(_rank: int, directory: str, parallel: dict[str, Any], count: int) -> tuple[Any, ...]:
    """Return values before and after an update on `count` rows, its gradient norm, and the weights of the body."""
    grid = jobs.grid_of(**parallel)
    options = StageOptions(60, backend("fused", torch.device("cpu")), distributed_optimizer=True, overlap=True)
    critic = CriticWorker(read_shape(directory), grid, options, OptimConfig(lr=1e-3, eps=1e-3))
    critic.load_hf(directory)
    if grid.last_stage:
        torch.nn.init.constant_(critic.critic.output_layer.weight, 0.1)
    prompts, responses = ([rows[i] for i in range(grid.dp_rank, count, grid.dp_size)] for rows in jobs.rows(1))
    before = critic.values(prompts, responses)
    step, _ = critic.train(prompts, responses, lambda _, values: ((values - 1).square().sum() / 100, None), 1e-3)
    return before, critic.values(prompts, responses), step.grad_norm, full_tensors(critic)


def masters(_rank: int, directory: str, parallel: dict[str, Any]) -> dict[str, tuple[int, Tensor]]:
    """Return this rank's part of each float32 master of a bfloat16 model, as (start in the flat parameter, values)."""
    options = {"dtype": torch.bfloat16, "distributed_optimizer": True}
    worker = jobs.make_worker(directory, parallel, OptimConfig(), **options)
    name_of = {id(p): name for name, p in names.global_parameters(worker.actor).items()}
    found = {}
    for optimizer in worker.optimizer.chained_optimizers:
        for groups in zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True):
            for p, shard in zip(*groups, strict=True):
                found[name_of[id(p)]] = (optimizer._get_model_param_range_map(p)["param"].start, shard.detach().clone())
    return found
