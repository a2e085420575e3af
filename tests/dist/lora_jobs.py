"""An update of LoRA adapters, as full tensors with the names of PEFT's files."""

from __future__ import annotations

from typing import Any

import torch
from dist.jobs import make_worker, rows, share, streamed
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import Tensor

from megatron_brorl.algo.policy_loss import token_weights
from megatron_brorl.config.schema import AlgoConfig, LoraConfig, OptimConfig, ReferenceConfig
from megatron_brorl.models.weights.layouts import to_local
from megatron_brorl.models.weights.names import global_parameters
from megatron_brorl.models.weights.stream import make_buckets, stream
from megatron_brorl.train.models import ReferencePolicy
from megatron_brorl.train.update import ActorLoss, update_policy
from megatron_brorl.train.worker import Worker, _reduce_gradients
from megatron_brorl.types import Experience

TEMPERATURE = 0.7
ADVANTAGES = torch.randn(24, generator=torch.Generator().manual_seed(3))


def experience_of(worker: Worker) -> Experience:
    """Return this data-parallel rank's part of the 24 responses of `rows`, whose ratios are 1."""
    prompts, responses, advantages = (share(column, worker.grid) for column in (*rows(2), ADVANTAGES))
    per_token = tuple(a.expand(len(r)) for a, r in zip(advantages, responses, strict=True))
    log_probs = worker.log_probs(prompts, responses, TEMPERATURE)
    return Experience(tuple(prompts), tuple(responses), tuple(log_probs), old_log_probs=None, advantages=per_token)


def fill(worker: Worker, adapters: dict[str, Tensor]) -> None:
    """Set the adapters to full tensors by PEFT's names."""
    parameters, grid = global_parameters(worker.actor), worker.grid
    for entry in worker.adapter_table:
        if entry.stage == grid.pp_rank:
            local = to_local(entry, [adapters[entry.hf[0]]], worker.shape.kv_heads, grid.tp_rank, grid.tp_size)
            parameters[entry.megatron].data.copy_(local)


def forward_and_gradients(
    _rank: int,
    directory: str,
    parallel: dict[str, Any],
    lora: LoraConfig,
    adapters: dict[str, Tensor],
    options: dict[str, Any],
) -> dict[str, Any]:
    """Return the results of a float64 model: log-probs, last logits, weights, and the gradients of the adapters."""
    worker = make_worker(directory, parallel, dtype=torch.float64, lora=lora, **options)
    fill(worker, adapters)
    grid, config = worker.grid, worker.actor.config
    results: dict[str, Any] = {
        "log_probs": worker.log_probs(*rows(2), TEMPERATURE),
        "logits": worker.last_logits(*rows(2)),
        "adapters": {name: tensor.clone() for name, tensor in worker.adapter_tensors()},
        "merged": streamed(worker),
    }

    # The worker's own DistributedDataParallel sums gradients in float32.
    worker.model = DistributedDataParallel(config, DistributedDataParallelConfig(), worker.actor)
    config.finalize_model_grads_func, config.no_sync_func = _reduce_gradients, worker.model.no_sync
    experience = experience_of(worker)
    lengths = [len(r) for r in experience.responses]
    weights = token_weights(lengths, "token_mean", tokens=sum(map(len, rows(2)[1])), sequences=24)
    loss = ActorLoss(experience, AlgoConfig(), weights)
    worker._run(worker.micro_batches(experience.prompts, experience.responses), loss, worker.head(TEMPERATURE))
    sums = {name: p.main_grad for name, p in global_parameters(worker.actor).items() if p.requires_grad}
    full = stream(make_buckets(worker.adapter_table, item_bytes=8), worker.shape.kv_heads, sums, grid, torch.float64)
    results["gradients"] = {name: tensor.clone() for name, tensor in full}
    return results


def train_with_reference(
    _rank: int, directory: str, parallel: dict[str, Any], options: dict[str, Any]
) -> tuple[dict[str, list[Tensor]], list[dict[str, Tensor]]]:
    """Take two updates, reset the reference, and take one more.

    Return log-probabilities by the model that computed them, and the adapters before and after the three updates.
    """
    optim = OptimConfig(lr=1e-2, eps=1e-3, clip_grad=0.1)
    worker = make_worker(directory, parallel, optim, lora=LoraConfig(rank=3, alpha=12.0), seed=5, **options)
    reference = ReferencePolicy(worker, ReferenceConfig())
    experience = experience_of(worker)
    inputs = experience.prompts, experience.responses, TEMPERATURE
    adapters = [{name: tensor.clone() for name, tensor in worker.adapter_tensors()}]

    def update(number: int) -> None:
        update_policy(
            worker, experience, [list(range(len(experience)))], AlgoConfig(), optim, TEMPERATURE, first_update=number
        )

    log_probs = {"base": worker.log_probs(*inputs)}
    for number in range(2):
        update(number)
    log_probs |= {"reference": reference.log_probs(*inputs), "trained": worker.log_probs(*inputs)}
    reference.reset()
    update(2)
    log_probs |= {"reference after its reset": reference.log_probs(*inputs), "actor": worker.log_probs(*inputs)}
    adapters.append({name: tensor.clone() for name, tensor in worker.adapter_tensors()})
    return log_probs, adapters
