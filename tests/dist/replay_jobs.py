"""Jobs with given experts, and with those that the built-in engine chose."""

from __future__ import annotations

from typing import Any

import torch
from dist import jobs
from dist.expert_jobs import full_tensors
from torch import Tensor

from megatron_brorl.config.schema import OptimConfig
from megatron_brorl.models.weights.names import hf_shapes
from megatron_brorl.ops.fused.decode import FusedDecode
from megatron_brorl.ops.reference.sampling import sample_tokens
from megatron_brorl.rollout.engine import Request, Sampling
from megatron_brorl.rollout.native.engine import TorchEngine
from megatron_brorl.rollout.watchdog import Watchdog
from megatron_brorl.train.weight_sync import LogProbGap, log_prob_gap
from megatron_brorl.types import Prompt


def gradients(
    _rank: int, directory: str, parallel: dict[str, Any], options: dict[str, Any], routes: list[Tensor]
) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
    """Return log-probabilities of this replica's rows with the given experts, and the gradient of the mean of -log p.

    The option first is the number of rows of the first replica.
    """
    first = options.pop("first", 12)
    worker = jobs.make_worker(directory, parallel, OptimConfig(clip_grad=0.0), **options)
    prompts, responses = jobs.rows(1)
    ends = [0, *[first] * (worker.grid.dp_size - 1), len(prompts)]
    own = range(ends[worker.grid.dp_rank], ends[worker.grid.dp_rank + 1])
    rows = [prompts[i] for i in own], [responses[i] for i in own]
    own_routes = [routes[i] for i in own]
    log_probs = dict(zip(own, worker.log_probs(*rows, 1.0, own_routes), strict=True))
    tokens = sum(map(len, responses))
    worker.train(*rows, lambda _, head: (-head.log_probs()[0].sum() / tokens, None), 1.0, 0.0, own_routes)
    return log_probs, full_tensors(worker, lambda p: p.main_grad)


def engine_gaps(_rank: int, directory: str) -> tuple[list[Tensor], list[LogProbGap]]:
    """Return log-probs of the actor in float32 minus those of an engine in bfloat16, without and with replay.

    Also returns the gaps of the probe after a weight sync.
    """
    worker = jobs.make_worker(directory, {}, tokens=2048)
    shape = worker.shape
    engine = TorchEngine(shape, hf_shapes(shape), jobs.CPU, torch.bfloat16, 100, sample_tokens, FusedDecode())
    engine.update_weights(worker.hf_tensors(), 0)
    prompts = [Prompt(str(i), "", tuple(p.tolist()), None, "exact") for i, p in enumerate(jobs.rows(4, 4)[0])]
    sampling = Sampling(1.0, 1.0, 0, 64, (2,), routes=True)
    groups = engine.generate([Request(p, 11 + i, 8) for i, p in enumerate(prompts)], sampling)
    inputs = [torch.tensor(p.token_ids) for p, group in zip(prompts, groups, strict=True) for _ in group]
    rollouts = [r for group in groups for r in group]
    gaps = []
    for routes in (None, [r.routes for r in rollouts]):
        actual = worker.log_probs(inputs, [r.token_ids for r in rollouts], 1.0, routes)
        gaps.append(torch.cat([a - r.log_probs for a, r in zip(actual, rollouts, strict=True)]))
    return gaps, [log_prob_gap(worker, Watchdog(engine, 60.0), 0, replay) for replay in (False, True)]
