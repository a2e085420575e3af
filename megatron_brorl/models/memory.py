"""What a run needs of memory, in both phases of a step, known before anything is built.

A rank trains and generates on one GPU in turn: while it trains, its engine has given all of its memory back; while the
engine generates, gradients are dropped and what train.offload moves lies in host memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron_brorl.errors import UserError
from megatron_brorl.model_shape import ModelShape
from megatron_brorl.models.hf_names import entries, hf_shapes
from megatron_brorl.parallel import device
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.reshard.layout import local_shape
from megatron_brorl.rollout.remote.weights_send import as_is, in_fp8_blocks, layout

GIB = 2**30
Parts = Mapping[str, int]  # bytes by what they are for


@dataclass(frozen=True)
class Training:
    """How a rank trains."""

    tensor: int
    pipeline: int
    stage: int  # of the pipeline
    shards: int  # ranks that moments and masters are cut over (ZeRO-1); 1: each has all
    dtype: torch.dtype  # of weights and activations
    tokens: int  # of a micro-batch on a rank
    recompute: bool  # activations, in the backward pass
    offload: bool  # weights, optimizer and reference lie in host memory while the engine generates
    critic: bool = False
    reference: bool = False


@dataclass(frozen=True)
class Generation:
    """How an engine in a process of its own generates."""

    tensor: int  # ranks that share it
    dtype: torch.dtype
    fp8_weights: bool
    fp8_cache: bool
    fraction: float  # of what is left, for keys and values
    context: int  # prompt + response tokens at most
    rows: int  # rollouts at a time, at most


@dataclass(frozen=True)
class Plan:
    """Bytes on a GPU in both phases, and on the host."""

    training: Parts
    generation: Parts  # without keys and values; the trainer's alone where the engine is built in
    offloaded: int  # of a rank, in host memory while the engine generates
    shared: int = 0  # of a node, in memory that processes share: the weights in use and those of an update
    kv_per_token: int = 0  # of an engine's GPU; 0 of the built-in engine
    fraction: float = 0.0  # of Generation
    context: int = 0  # of Generation

    def kv_tokens(self, gpu: int) -> int:
        """Tokens whose keys and values fit on a GPU of so many bytes."""
        free = gpu - sum(self.generation.values())
        return max(0, int(free * self.fraction) // self.kv_per_token) if self.kv_per_token else 0

    def rows(self, gpu: int) -> int:
        """Longest responses with their prompts, that fit together."""
        return self.kv_tokens(gpu) // self.context if self.context else 0


def training_parts(
    shape: ModelShape, stage: int, tensor: int, pipeline: int, dtype: torch.dtype, shards: int = 1
) -> Parts:
    """Bytes of a rank's weights, fp32 gradients, and Adam's moments with fp32 masters beside weights that are no fp32.

    Arguments as in Training; shards: Rajbhandari et al. 2020, section 5.1.
    """
    table = entries(shape, pipeline)
    count = sum(math.prod(local_shape(e, tensor)) for e in table if e.stage == stage)
    if shape.tied and stage == pipeline - 1 > 0:
        count += math.prod(local_shape(table[0], tensor))  # the last stage's copy of the embedding
    masters = 0 if dtype == torch.float32 else 4
    return {
        "weights": count * dtype.itemsize,
        "gradients": count * 4,
        "optimizer": count * (8 + masters) // shards,
    }


def training_bytes(
    shape: ModelShape, stage: int, tensor: int, pipeline: int, dtype: torch.dtype, shards: int = 1
) -> int:
    """The sum of training_parts. Activations come on top."""
    return sum(training_parts(shape, stage, tensor, pipeline, dtype, shards).values())


def activation_bytes(shape: ModelShape, training: Training) -> int:
    """An estimate of what the backward pass needs of the forward pass, where attention and the loss keep no squares.

    Per token and layer, in elements: the inputs of both norms and of both parts (4 H), queries, keys, values and what
    attention gives (2 Q + 2 K), gate, up and their product (3 F), of which tensor parallelism cuts all but the first.
    Recomputed: the input of each layer, and all of one. A stage has as many micro-batches in flight as stages follow.
    """
    q, k = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    whole = 4 * shape.hidden + (2 * q + 2 * k + 3 * shape.ffn) // training.tensor
    layers, flying = shape.layers // training.pipeline, training.pipeline - training.stage
    per_token = flying * layers * shape.hidden + whole if training.recompute else flying * layers * whole
    return training.tokens * per_token * training.dtype.itemsize


def kv_bytes(shape: ModelShape, generation: Generation) -> int:
    """Of keys and values of one token, on each GPU of an engine."""
    heads = -(-shape.kv_heads // generation.tensor)
    return 2 * shape.layers * heads * shape.head_dim * (1 if generation.fp8_cache else generation.dtype.itemsize)


def sent_bytes(shape: ModelShape, dtype: torch.dtype, fp8: bool) -> int:
    """Of the weights as an engine is sent them, in one file."""
    return layout(hf_shapes(shape), dtype, in_fp8_blocks if fp8 else as_is)[1]


def plan(shape: ModelShape, training: Training, generation: Generation | None) -> Plan:
    """What a rank needs. generation: None of the built-in engine, whose weights are the actor's copy and a cache."""
    # Every model that is trained takes what the actor takes; a reference is weights alone.
    t = training
    parts = training_parts(shape, t.stage, t.tensor, t.pipeline, t.dtype, t.shards)
    models = {"": parts} | ({"critic's ": parts} if t.critic else {})  # a critic has the actor's shape but for its head
    reference = {"reference": parts["weights"]} if t.reference else {}

    # While it trains everything is there; afterwards gradients are dropped, and the rest stays or moves to the host.
    staying = {f"{of}{name}": x for of, own in models.items() for name, x in own.items() if name != "gradients"}
    staying |= reference
    gradients = {f"{of}gradients": own["gradients"] for of, own in models.items()}
    all_of_it = {**staying, **gradients, "activations (estimate)": activation_bytes(shape, t)}
    offloaded = sum(staying.values()) if t.offload else 0
    left = {} if t.offload else {f"trainer's {name}": x for name, x in staying.items()}

    # The built-in engine takes what is free when it generates.
    if generation is None:
        return Plan(all_of_it, left, offloaded)

    # TensorRT-LLM's samplers keep a table of log-probs of every row's longest response.
    g = generation
    sent = sent_bytes(shape, g.dtype, g.fp8_weights)
    engine = {"engine's weights": sent // g.tensor, "table of log-probs": 4 * g.rows * g.context}
    return Plan(
        training=all_of_it,
        generation={**left, **engine},
        offloaded=offloaded,
        shared=2 * sent,
        kv_per_token=kv_bytes(shape, g),
        fraction=g.fraction,
        context=g.context,
    )


def lines(plan: Plan, gpu: int, ranks_per_node: int) -> list[str]:
    """The plan for people. gpu: bytes of a GPU; 0 where there is none, and the node's memory is all."""
    # A line per phase, each with its sum first.
    found = []
    if gpu:
        kv = {"keys and values": plan.kv_tokens(gpu) * plan.kv_per_token} if plan.kv_per_token else {}
        for phase, parts in (("training", plan.training), ("generating", {**plan.generation, **kv})):
            found.append(f"memory of a GPU, {phase}: {amount(sum(parts.values()))} of {amount(gpu)} ({_each(parts)})")
    else:
        # Of ranks on CPUs, whose engine is the built-in one, what training takes is the most.
        found.append(f"memory of a rank, training: {amount(sum(plan.training.values()))} ({_each(plan.training)})")

    # What an engine's room means for a step: how many of its rollouts run at a time.
    if gpu and plan.kv_per_token:
        found.append(
            f"keys and values: {plan.kv_per_token / 1024:g} KiB a token on each GPU, {plan.kv_tokens(gpu)} tokens, "
            f"{plan.rows(gpu)} rollouts of {plan.context} tokens at a time"
        )

    # On the host, whether there are GPUs or not.
    shared = [f"{amount(plan.shared)} shared (weights in use and those of an update)"] if plan.shared else []
    moved = [f"{amount(plan.offloaded * ranks_per_node)} of what is offloaded"] if plan.offloaded else []
    return [*found, f"memory of a node: {', '.join(shared + moved)}"] if shared or moved else found


def _each(parts: Parts) -> str:
    return ", ".join(f"{name} {amount(x)}" for name, x in parts.items())


def check_plan(plan: Plan, gpu: int, host: int, shared: int, ranks_per_node: int, folder: str) -> None:
    """Raise UserError, in one line, where the plan does not fit.

    gpu: bytes of a GPU; 0 where there is none. host, shared: bytes of a node's memory, and of that what `folder` has
    room for (what is there now counts as free).
    """
    # Each phase on a GPU by itself.
    need = sum(plan.training.values())
    if gpu and need > gpu:
        raise UserError(
            f"training needs about {amount(need)} on a GPU, which has {amount(gpu)}: lower "
            "train.tokens_per_micro_batch, set train.recompute, or raise parallel.tensor or parallel.pipeline"
        )

    # The longest response must fit while it is alone, or it could never end.
    if gpu and plan.kv_per_token and not plan.rows(gpu):
        raise UserError(
            f"while an engine generates, {plan.kv_tokens(gpu)} tokens of keys and values fit on a GPU and one response "
            f"with its prompt may take {plan.context}: set train.offload = true, or lower rollout.max_tokens"
        )

    # The node: what is shared is a part of its memory.
    if plan.shared > shared:
        raise UserError(
            f"{folder} has room for {amount(shared)} and a node needs {amount(plan.shared)}, the weights in use and "
            f"those of an update: docker run --shm-size={math.ceil(plan.shared / GIB)}g, or name another folder in "
            "memory"
        )
    # Without GPUs nothing is moved: what is offloaded then is in host memory in any case.
    whole = plan.offloaded * ranks_per_node + plan.shared
    if gpu and whole > host:
        raise UserError(
            f"a node needs {amount(whole)} of host memory for what train.offload moves there and for weights, and has "
            f"{amount(host)}: set train.offload = false, or parallel.distributed_optimizer = true"
        )


def amount(count: int) -> str:
    """Bytes, for people."""
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"


def check(shape: ModelShape, grid: Grid, dtype: torch.dtype, distributed_optimizer: bool) -> None:
    """Raise UserError where a model of this shape cannot be trained on this rank's GPU."""
    if not device.on_gpu():
        return
    shards = grid.data * grid.context if distributed_optimizer else 1
    need = training_bytes(shape, grid.pp_rank, grid.tensor, grid.pipeline, dtype, shards)
    have = torch.cuda.get_device_properties(device.default_device()).total_memory
    if need > have:
        raise UserError(
            f"training needs {amount(need)} on a rank for weights, gradients and optimizer, the GPU has "
            f"{amount(have)}: raise parallel.tensor or parallel.pipeline, or parallel.distributed_optimizer = true"
        )
