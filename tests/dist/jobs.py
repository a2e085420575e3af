"""Functions that the processes of tests/dist run. Each takes the rank first and returns plain tensors or numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tiny
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from ops.linear_cases import make

from megatron_brorl.algo.policy_loss import PolicyLossSettings
from megatron_brorl.checkpoints import hugging_face
from megatron_brorl.config.schema import AlgoConfig, OptimConfig, ParallelConfig
from megatron_brorl.families.shape import read_shape
from megatron_brorl.models.weights.names import hf_shapes
from megatron_brorl.ops.backend import backend
from megatron_brorl.ops.fused import linear as fused
from megatron_brorl.ops.fused.decode import FusedDecode
from megatron_brorl.ops.reference.sampling import sample_tokens
from megatron_brorl.parallel import cpu_bridge
from megatron_brorl.parallel import grid as grids
from megatron_brorl.parallel.packing import Packed
from megatron_brorl.rollout.engine import Request, Sampling
from megatron_brorl.rollout.native.torch_engine import TorchEngine
from megatron_brorl.train.update import update_policy
from megatron_brorl.train.worker import StageOptions, Worker
from megatron_brorl.types import Experience, Prompt

CPU = torch.device("cpu")
PROMPT_OF_ROW = [0] * 9 + [1] * 3 + [2] * 11 + [3]  # the prompt index of each of the 24 rows


def rows(seed: int, count: int = 24) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return prompt and response of each row. Four prompts have 9, 3, 11 and 1 of 24 rows; response 0 is one token."""
    g = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(3, tiny.VOCAB, (n,), generator=g) for n in (5, 9, 2, 6)]
    lengths = [1, *torch.randint(1, 20, (count - 1,), generator=g).tolist()]
    responses = [torch.randint(3, tiny.VOCAB, (n,), generator=g) for n in lengths]
    return [prompts[PROMPT_OF_ROW[24 * i // count]] for i in range(count)], responses


def share(items: Sequence[Any], grid: grids.Grid) -> list[Any]:
    """Return the items of this data-parallel rank."""
    begin, end = (len(items) * rank // grid.dp_size for rank in (grid.dp_rank, grid.dp_rank + 1))
    return list(items[begin:end])


_GRIDS: dict[str, tuple[grids.Grid, dict[str, Any]]] = {}


def grid_of(**parallel: Any) -> grids.Grid:
    """Return the grid of a layout, built once, and make it the one in Megatron's global variables."""
    key = repr(sorted(parallel.items()))
    if key not in _GRIDS:
        grid = grids.build(ParallelConfig(**parallel))
        _GRIDS[key] = (grid, {k: v for k, v in vars(parallel_state).items() if k.startswith("_") and k[1:2].isupper()})
    grid, megatron_globals = _GRIDS[key]
    vars(parallel_state).update(megatron_globals)
    return grid


def make_worker(
    directory: str,
    parallel: dict[str, Any],
    optim: OptimConfig | None = None,
    tokens: int = 120,
    kind: Any = Worker,
    **kwargs: Any,
) -> Any:
    """Return a worker of this kind with the weights of a Hugging Face directory."""
    grid = grid_of(**parallel)
    ops = backend(kwargs.pop("ops", "fused"), cpu_bridge.default_device())
    options = StageOptions(tokens, ops, **{"share_prompt": grid.cp_size == 1, **kwargs})
    worker = kind(read_shape(directory), grid, options, optim)
    worker.load_hf(directory)
    return worker


def forward_and_export(
    rank: int, directory: str, parallel: dict[str, Any], temperature: float, target: str
) -> tuple[list[torch.Tensor], dict[int, torch.Tensor], dict[str, torch.Tensor]]:
    """Return log-probs of the responses, on the last stage all logits [G, V] of every row, and the streamed weights.

    Rank 0 writes the weights to the directory `target`.
    """
    prompts, responses = rows(1)
    worker = make_worker(directory, parallel)
    actor = worker.actor
    logits = {}

    def head(hidden: torch.Tensor, batch: Packed, temperature: float) -> Any:
        shard = hidden.squeeze(1)[batch.predict] @ actor.head_weight().t()
        shards = [torch.empty_like(shard) for _ in range(worker.grid.tp_size)]
        dist.all_gather(shards, shard, group=worker.grid.groups.tp)
        logits.update(batch.split(torch.cat(shards, dim=-1)[:, : worker.shape.vocab]))
        return type(actor).head(actor, hidden, batch, temperature)

    actor.head = head
    log_probs = worker.log_probs(prompts, responses, temperature)
    for row_logits in logits.values():
        dist.all_reduce(row_logits, group=worker.grid.groups.cp)  # zeros except for this rank's tokens
    weights = streamed(worker)
    if rank == 0:
        hugging_face.save(weights.items(), directory, target, "float32")
    return log_probs, logits, weights


def streamed(worker: Worker) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in worker.hf_tensors()}


def train_steps(
    _rank: int, directory: str, parallel: dict[str, Any], options: dict[str, Any]
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Take two policy updates from the same weights and batch; return the metrics of each and the final weights."""
    # Adam's eps is well above float32 noise. At 1e-8 the first step is the sign of each gradient, also of those (key
    # biases) that are zero up to rounding, and a test would compare rounding errors.
    optim = OptimConfig(lr=1e-2, clip_grad=0.5, weight_decay=0.1, eps=1e-3)
    worker = make_worker(directory, parallel, optim, **{k: v for k, v in options.items() if k != "algo"})
    prompts, responses = rows(2)
    g = torch.Generator().manual_seed(3)
    noise = [0.3 * torch.randn(len(r), generator=g) for r in responses]
    advantages = torch.randn(len(responses), generator=g)
    own_rows = share(range(len(prompts)), worker.grid)
    experience = Experience(
        prompts=tuple(prompts),
        responses=tuple(responses),
        rollout_log_probs=tuple(-4.0 + 0.5 * n for n in noise),
        old_log_probs=tuple(-4.0 + n for n in noise),
        advantages=tuple(a.expand(len(r)) for a, r in zip(advantages, responses, strict=True)),
    ).select(own_rows)
    algo = AlgoConfig(**({"eps_low": 0.9, "eps_high": 4.0} | options.get("algo", {})))
    metrics = []
    one_batch = [list(range(len(experience)))]
    for update in range(2):
        worker.offload()  # moves the weights only with the option offload
        assert any(p.untyped_storage().nbytes() for p in worker.actor.parameters()) != bool(options.get("offload"))
        metrics.append(update_policy(worker, experience, one_batch, algo, optim, temperature=0.9, first_update=update))
    return metrics, streamed(worker)


def training_bytes(_rank: int, directory: str, parallel: dict[str, Any], options: dict[str, Any]) -> tuple[int, int]:
    """Return the pipeline stage, and the bytes of weights, gradients and optimizer after a step."""
    worker = make_worker(directory, parallel, OptimConfig(), **options)
    prompts, responses = map(tuple, rows(2))
    zeros, ones = (tuple(torch.full((len(r),), x) for r in responses) for x in (0.0, 1.0))
    experience = Experience(prompts, responses, rollout_log_probs=zeros, old_log_probs=None, advantages=ones)
    update_policy(worker, experience, [list(range(24))], AlgoConfig(), OptimConfig(), temperature=1.0, first_update=0)
    tensors = [*worker.actor.parameters(), *worker._gradient_buffers(), *worker._optimizer_tensors()]
    # Tensors may share a storage. Those with one element are step counters.
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors if x.numel() > 1}
    return worker.grid.pp_rank, sum(s.nbytes() for s in storages.values())


def engine_gap(rank: int, directory: str, parallel: dict[str, Any]) -> float:
    """Return the largest |log-prob of the engine - log-prob of the actor| over sampled tokens after a weight sync."""
    return float(engine_gaps(rank, directory, parallel, torch.float32, replay=False).max())


def engine_gaps(_rank: int, directory: str, parallel: dict[str, Any], dtype: torch.dtype, replay: bool) -> torch.Tensor:
    """Return |log-prob of the engine - log-prob of the actor| of sampled tokens. replay: use the engine's experts."""
    worker = make_worker(directory, parallel)
    shape = worker.shape
    engine = TorchEngine(shape, hf_shapes(shape), CPU, dtype, max_rows=100, sample=sample_tokens, ops=FusedDecode())
    engine.update_weights(worker.hf_tensors(), version=0)
    prompts = [Prompt(str(i), "", tuple(p.tolist()), None, "exact") for i, p in enumerate(rows(seed=4, count=4)[0])]
    sampling = Sampling(temperature=0.9, top_p=1, top_k=0, max_tokens=24, stop_ids=(2,), routes=replay)
    groups = engine.generate([Request(p, key=11 + i, n=16) for i, p in enumerate(prompts)], sampling)
    prompt_ids = [torch.tensor(p.token_ids) for p, g in zip(prompts, groups, strict=True) for _rollout in g]
    rollouts = [r for g in groups for r in g]
    routes = [r.routes for r in rollouts] if replay else None
    actual = worker.log_probs(prompt_ids, [r.token_ids for r in rollouts], sampling.temperature, routes)
    return torch.cat([(a - r.log_probs).abs() for a, r in zip(actual, rollouts, strict=True)])


def bf16_step(_rank: int, directory: str) -> tuple[list[dict[str, float]], set[torch.dtype]]:
    """Take two updates in bfloat16 with float32 masters; return metrics and the dtypes of the weights."""
    optim = OptimConfig(lr=1e-3)
    worker = make_worker(directory, {}, optim, tokens=200, dtype=torch.bfloat16)
    prompts, responses = map(tuple, rows(2))
    log_probs = worker.log_probs(prompts, responses, temperature=1.0)
    advantages = torch.linspace(-1, 1, len(prompts))
    per_token = tuple(a.expand(len(r)) for a, r in zip(advantages, responses, strict=True))
    experience = Experience(prompts, responses, tuple(log_probs), old_log_probs=None, advantages=per_token)
    metrics = [update_policy(worker, experience, [list(range(24))], AlgoConfig(), optim, 1.0, i) for i in range(2)]
    return metrics, {p.dtype for p in worker.actor.parameters()}


def fused_loss(rank: int, world: int, seed: int, settings: PolicyLossSettings, padded: int = 1600) -> tuple[Any, ...]:
    """Return the fused loss in float32, and the gradients, from this rank's shard of a weight with `padded` rows."""
    case = make(rows=150, width=16, vocab=1001, seed=seed)
    shard_rows = padded // world  # the shards of the last ranks are partly or all padding
    weight = torch.full((padded, 16), 1e3, dtype=torch.float64)
    weight[:1001] = case.weight
    shard = dataclasses.replace(case, weight=weight[rank * shard_rows : (rank + 1) * shard_rows])
    sharding = {"group": grid_of(tensor=world).groups.tp, "vocab": 1001}
    result, *grads = shard.call(fused.linear_ppo_loss, torch.float32, settings, upstream=-1.5, **sharding)
    return dataclasses.replace(result, loss=result.loss.detach()), *grads


def pipeline_messages(
    rank: int, directory: str, parallel: dict[str, Any]
) -> dict[str, list[tuple[torch.dtype, tuple[int, ...]]]]:
    """Return dtype and shape of the tensors that two training steps send to and receive from other stages, by call."""
    messages: dict[str, list[Any]] = {"isend": [], "irecv": []}
    original = dist.batch_isend_irecv

    def recorded(ops: list[dist.P2POp]) -> Any:
        for op in ops:
            messages[op.op.__name__].append((op.tensor.dtype, tuple(op.tensor.shape)))
        return original(ops)

    dist.batch_isend_irecv = recorded
    try:
        train_steps(rank, directory, parallel, {"tokens": 60})
    finally:
        dist.batch_isend_irecv = original
    return messages


def groups(
    rank: int, parallel: dict[str, Any], names: list[str]
) -> tuple[dict[str, list[int]], dict[str, float], list[tuple[str, str]]]:
    """Return the ranks of each group, the sum of 10^rank over it, and the pairs of names that share a group."""
    grid = grid_of(**parallel)
    process_groups = {name: grid.replica if name == "replica" else getattr(grid.groups, name) for name in names}
    sums = {}
    for name, group in process_groups.items():
        number = torch.tensor(10.0**rank)
        dist.all_reduce(number, group=group)
        sums[name] = float(number)
    same = [(a, b) for a in names for b in names if process_groups[a] is process_groups[b]]
    return {name: dist.get_process_group_ranks(group) for name, group in process_groups.items()}, sums, same
