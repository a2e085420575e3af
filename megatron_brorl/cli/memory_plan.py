"""Plan the memory of a run in both phases of a step, before any model is built.

A rank trains and generates on one GPU in turn. While it trains, its engine keeps only its CUDA context. While the
engine generates, gradients are dropped, and train.offload moves weights and optimizer to host memory. On a CPU, both
phases use the memory of one process (parallel.cpu_bridge.keep_freed_memory), so its peak is that of the larger phase.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron_brorl.cli.teacher import teacher_shape
from megatron_brorl.config.load import load
from megatron_brorl.config.rules import check_model
from megatron_brorl.config.schema import Config, LoraConfig
from megatron_brorl.data.hub import model_directory
from megatron_brorl.errors import UserError
from megatron_brorl.families.shape import ModelShape, read_shape
from megatron_brorl.models.gpt import DTYPES
from megatron_brorl.models.weights.layouts import WeightEntry, local_shape
from megatron_brorl.models.weights.names import adapter_entries, entries, hf_shapes
from megatron_brorl.parallel.grid import check_ranks
from megatron_brorl.rollout.native.pages import host_memory, page_bytes, pages_for
from megatron_brorl.rollout.registry import ENGINES, graph_sizes
from megatron_brorl.rollout.remote.weights_in_trainer import file_layout, to_fp8_blocks, unchanged
from megatron_brorl.train.sampling_params import context

GIB = 2**30
LIBRARIES = GIB // 2  # bytes of a process on a CPU: code, Python objects, tokenizer and data
CUDA_CONTEXT = GIB // 2  # bytes of a process on a GPU, with the libraries that it loads (estimate)
CUDA_GRAPH = 16 * 2**20  # bytes of a graph; an engine has one per number of rows (estimate)
ROLLOUT = 10 * 2**10  # bytes of the objects of a response on a CPU (measured)
LOGITS_ROWS = 512  # rows of logits that ops.fused.linear holds at a time on a CPU
GAPS = 0.2  # free gaps between tensors on a CPU, relative to their memory; fitted to runs in docs/measurements.md
Parts = Mapping[str, int]  # bytes by purpose
_REMEDIES = {  # part on a CPU -> keys that lower it
    "activations (estimate)": "lower train.tokens_per_micro_batch, or set train.recompute",
    "keys and values": "lower rollout.kv_cache_mib",
    "rollouts": "lower rollout.prompts, rollout.n or evaluate.samples",
}


@dataclass(frozen=True)
class Machines:
    """The machines of a run."""

    ranks: int
    ranks_per_node: int
    gpu: int  # bytes of a GPU, or 0 for ranks on CPUs
    here: bool = True  # this machine is one of them, so that its host memory counts
    free: int = sys.maxsize  # bytes of a node's host memory that are free before the run


@dataclass(frozen=True)
class PromptSizes:
    """Sizes of the prompts of a run; 0 in `brorl doctor`, which does not read the data."""

    longest: int = 0  # tokens
    held_out: int = 0  # number of prompts


@dataclass(frozen=True)
class Plan:
    """Bytes on a GPU in both phases, and in host memory."""

    training: Parts
    generation: Parts  # on a GPU without keys and values, and with the built-in engine only the trainer's states
    offloaded: int  # bytes that a rank moves to host memory while the engine generates
    shared: int = 0  # bytes of shared memory per node: the current weights and those of an update
    kv_per_token: int = 0  # bytes of keys and values per token, on each GPU of an engine; 0 for the built-in engine
    fraction: float = 0.0  # share of the remaining memory for keys and values
    context: int = 0  # maximum tokens of a prompt with its response

    def kv_tokens(self, gpu: int) -> int:
        """Return the number of tokens whose keys and values fit on a GPU with `gpu` bytes of memory."""
        free = gpu - sum(self.generation.values())
        return max(0, int(free * self.fraction) // self.kv_per_token) if self.kv_per_token else 0

    def rows(self, gpu: int) -> int:
        """Return the number of the longest responses, with prompts, that fit together."""
        return self.kv_tokens(gpu) // self.context if self.context else 0


def training_parts(
    shape: ModelShape,
    stage: int,
    tensor: int,
    pipeline: int,
    dtype: torch.dtype,
    expert: int = 1,
    shards: int = 1,
    expert_shards: int = 1,
    lora: LoraConfig | None = None,
) -> Parts:
    """Return the bytes of a rank's weights, fp32 gradients, and Adam's states (with fp32 masters of bf16 weights).

    shards: number of ranks over which ZeRO-1 splits Adam's states (Rajbhandari et al. 2020, section 5.1).
    expert_shards: the same for experts. lora: with rank > 0, only adapters have gradients and Adam's states.
    """
    table = entries(shape, pipeline)
    dense = _elements([entry for entry in table if entry.expert is None], stage, tensor)
    if shape.tied and pipeline > 1 and stage == pipeline - 1:
        dense += math.prod(local_shape(table[0], tensor))  # the last stage's copy of the embedding
    experts = _elements([entry for entry in table if entry.expert is not None], stage, tensor) // expert
    adapters = _elements(adapter_entries(shape, pipeline, lora), stage, tensor) if lora and lora.rank else 0
    trained, trained_experts = (adapters, 0) if adapters else (dense, experts)
    state_bytes = 8 if dtype == torch.float32 else 12  # per weight: two moments, and fp32 masters of bf16
    return {
        "weights": (dense + experts) * dtype.itemsize,
        **({"adapters": adapters * dtype.itemsize} if adapters else {}),
        "gradients": (trained + trained_experts) * 4,
        "optimizer": trained * state_bytes // shards + trained_experts * state_bytes // expert_shards,
    }


def _elements(table: Sequence[WeightEntry], stage: int, tensor: int) -> int:
    return sum(math.prod(local_shape(entry, tensor)) for entry in table if entry.stage == stage)


def trained_weights(parts: Parts) -> int:
    """Return the bytes of the weights that are trained, from `training_parts`."""
    return parts.get("adapters", parts["weights"])


def activation_bytes(config: Config, shape: ModelShape, tokens: int, stage: int, fused: bool) -> int:
    """Return an estimate of the activations that the backward pass of a micro-batch needs.

    Elements per token and layer, with H, Q, K and F for the widths of hidden states, queries, keys and MLP: 4 H for the
    inputs of two norms, attention and MLP; 2 Q + 2 K for queries, keys, values and the output of attention; 3 F for
    gate, up and their product. Tensor parallelism divides all but the 4 H. models.layers.fused keeps 2 H and 2 F
    instead of 4 H and 3 F. Each adapter adds its rank. With recomputation: the input of each layer, and all of one
    layer. A stage has as many micro-batches in flight as there are stages from it to the last.

    In a mixture of experts, if all experts are chosen equally often, a token has the 3 F, and 2 H for input and output,
    per chosen expert. One layer at a time also has the rows that it sends and receives (2 H each). A shared expert has
    the 3 F, and its output (H), which its gate scales.
    """
    parallel = config.parallel
    attention = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    hidden_tensors, ffn_tensors = (2, 2) if fused else (4, 3)
    mlp = ffn_tensors * shape.ffn
    dispatched = 0
    if shape.experts:
        hidden_tensors += fused + (shape.shared_ffn > 0)  # router's input, shared expert's output
        dispatched = 2 * shape.chosen_experts * shape.hidden // parallel.tensor
        mlp = shape.chosen_experts * (mlp + 2 * shape.hidden) + ffn_tensors * shape.shared_ffn
    per_layer = hidden_tensors * shape.hidden + (attention + mlp) // parallel.tensor
    per_layer += config.lora.rank * len(config.lora.targets)
    layers_in_flight = (parallel.pipeline - stage) * (shape.layers // parallel.pipeline)
    if config.train.recompute == "full":
        per_token = layers_in_flight * shape.hidden + per_layer + dispatched
    else:
        per_token = layers_in_flight * per_layer + dispatched
    return tokens * per_token * DTYPES[config.model.dtype].itemsize


def micro_batch_tokens(config: Config, on_gpu: bool) -> int:
    """Return train.tokens_per_micro_batch, or its default."""
    return config.train.tokens_per_micro_batch or (16384 if on_gpu else 2048)


def largest_micro_batch(config: Config, machines: Machines, prompts: PromptSizes) -> int:
    """Return the tokens of a full micro-batch, or of the longest mini-batch of a rank if that is known to be less."""
    limit = micro_batch_tokens(config, bool(machines.gpu))
    if not prompts.longest:
        return limit
    parallel, rollout = config.parallel, config.rollout
    replicas = machines.ranks // (parallel.tensor * parallel.pipeline * parallel.context)
    trained = rollout.prompts * (config.algo.train_on or rollout.n)
    rows = math.ceil(trained / (config.algo.mini_batches * replicas))
    prefixes = min(rows, rollout.prompts) if config.train.share_prompt else rows
    return min(limit, rows * rollout.max_tokens + prefixes * prompts.longest)


def engine_parts(config: Config, shape: ModelShape, machines: Machines, prompts: PromptSizes, others: int) -> Parts:
    """Return the memory of the built-in engine on a CPU in its largest call, of a step or of an evaluation.

    others: bytes that the rank already has when the engine allocates its keys and values.
    """
    rollout = config.rollout
    ranks = machines.ranks
    dtype = DTYPES[rollout.dtype]

    def pages(count: int, n: int) -> int:
        rows = min(rollout.max_num_seqs, math.ceil(count * n / ranks))
        return math.ceil(count / ranks) * pages_for(prompts.longest) + rows * pages_for(rollout.max_tokens)

    calls = [(rollout.prompts, rollout.n), (prompts.held_out, config.evaluate.samples)]  # prompts, samples of each
    max_pages = max(pages(count, n) for count, n in calls)
    # A tied head may be a second copy of the embedding in float32, see rollout.native.decoder.
    head = 4 * shape.vocab * shape.hidden if shape.tied else 0
    weights = sum(map(math.prod, hf_shapes(shape).values())) * dtype.itemsize + head
    half_of_free = max(0, machines.free // machines.ranks_per_node - others - weights) // 2  # default of kv_cache_mib
    limit = rollout.kv_cache_mib * 2**20 or half_of_free
    return {
        "engine's weights": weights,
        "keys and values": min(max_pages * page_bytes(shape, dtype), limit),
        "rollouts": ROLLOUT * max(count * n for count, n in calls) // ranks,
    }


def with_overhead(parts: Parts) -> Parts:
    """Return the parts of a process on a CPU with its libraries and the gaps in its heap."""
    return {**parts, "gaps (estimate)": int(GAPS * sum(parts.values())), "libraries": LIBRARIES}


def plan_stage(
    config: Config, shape: ModelShape, machines: Machines, stage: int = 0, prompts: PromptSizes = PromptSizes()
) -> Plan:
    """Return the plan of a rank of a pipeline stage. Raises UserError if [parallel] does not fit the ranks."""
    parallel = config.parallel
    check_ranks(parallel, machines.ranks)
    stage_ranks = machines.ranks // parallel.pipeline
    size = stage, parallel.tensor, parallel.pipeline, DTYPES[config.model.dtype], parallel.expert  # of training_parts
    zero1 = parallel.distributed_optimizer
    shards = (stage_ranks // parallel.tensor, stage_ranks // parallel.expert) if zero1 else (1, 1)
    parts = training_parts(shape, *size, *shards, lora=config.lora)
    gae = config.algo.advantage == "gae"
    models = {"": parts} | ({"critic's ": training_parts(shape, *size, *shards)} if gae else {})

    # While the engine generates, gradients are dropped, and the rest stays or moves to the host.
    staying = {f"{kind}{name}": x for kind, sizes in models.items() for name, x in sizes.items() if name != "gradients"}
    staying |= {"reference": trained_weights(parts)} if config.algo.kl_coef > 0 else {}
    if config.teacher.path:
        staying["teacher"] = training_parts(teacher_shape(config), *size)["weights"]
    gradients = {f"{kind}gradients": sizes["gradients"] for kind, sizes in models.items()}
    tokens = largest_micro_batch(config, machines, prompts)
    fused = not machines.gpu and config.ops.implementation == "fused" and shape.is_llama_like
    activations = activation_bytes(config, shape, tokens, stage, fused)
    built_in = config.rollout.engine not in ENGINES
    contexts = {"CUDA contexts (estimate)": CUDA_CONTEXT * (1 if built_in else 2)} if machines.gpu else {}
    training = {**staying, **gradients, "activations (estimate)": activations, **contexts}
    offloaded = sum(staying.values()) if config.train.offload else 0
    remaining = {} if config.train.offload else {f"trainer's {name}": x for name, x in staying.items()}
    remaining |= contexts

    if built_in and not machines.gpu:
        is_last = stage == parallel.pipeline - 1
        # The float32 logits of a chunk, and the gradient of the head's weight if it is trained.
        rows = min(tokens, LOGITS_ROWS) + (0 if config.lora.rank else shape.hidden)
        head = 4 * rows * shape.vocab // parallel.tensor if is_last else 0
        generation = {**staying, **engine_parts(config, shape, machines, prompts, sum(staying.values()))}
        training |= {"LM head": head, "rollouts": ROLLOUT * config.rollout.prompts * config.rollout.n // machines.ranks}
        return Plan(with_overhead(training), with_overhead(generation), offloaded)
    if built_in:  # it uses the free memory
        return Plan(training, remaining, offloaded)

    engine = config.engine
    dtype = DTYPES[config.rollout.dtype]
    length = context(config, shape)
    fp8 = ENGINES[config.rollout.engine].takes_fp8_blocks and engine.quantization == "fp8"
    weights = file_layout(hf_shapes(shape), dtype, to_fp8_blocks if fp8 else unchanged)[1]
    # The sampler of TensorRT-LLM has a table of log-probs for the longest response of every sequence.
    table = 4 * config.rollout.max_num_seqs * length
    graphs = {}
    if machines.gpu and engine.cuda_graphs:
        graphs["CUDA graphs (estimate)"] = CUDA_GRAPH * len(graph_sizes(config.rollout.max_num_seqs))
    heads = math.ceil(shape.kv_heads / engine.tensor)
    return Plan(
        training=training,
        generation={**remaining, "engine's weights": weights // engine.tensor, "table of log-probs": table, **graphs},
        offloaded=offloaded,
        shared=2 * weights,
        kv_per_token=2 * shape.layers * heads * shape.head_dim * (1 if engine.kv_dtype == "fp8" else dtype.itemsize),
        fraction=engine.memory_fraction,
        context=length,
    )


def plan_lines(plan: Plan, machines: Machines) -> list[str]:
    """Return the plan in words."""
    gpu = machines.gpu
    if not gpu:
        phases = [("training", plan.training), *([("generating", plan.generation)] if plan.generation else [])]
        lines = [f"memory of a rank, {phase}: {amount(sum(p.values()))} ({_amounts(p)})" for phase, p in phases]
        _, need, _ = host_need(plan, machines)
        if need > machines.free:
            lines.append(f"note: the ranks of a node need {amount(need)}, and {amount(machines.free)} are free now")
    else:
        kv = {"keys and values": plan.kv_tokens(gpu) * plan.kv_per_token} if plan.kv_per_token else {}
        lines = [
            f"memory of a GPU, {phase}: {amount(sum(parts.values()))} of {amount(gpu)} ({_amounts(parts)})"
            for phase, parts in (("training", plan.training), ("generating", {**plan.generation, **kv}))
        ]
    if gpu and plan.kv_per_token:
        lines.append(
            f"keys and values: {plan.kv_per_token / 1024:g} KiB a token on each GPU, {plan.kv_tokens(gpu)} tokens, "
            f"{plan.rows(gpu)} rollouts of {plan.context} tokens at a time"
        )
    if plan.shared or plan.offloaded:
        offloaded = amount(plan.offloaded * machines.ranks_per_node)
        lines.append(f"memory of a node: {amount(plan.shared)} of engine weights, {offloaded} of offloaded states")
    return lines


def _amounts(parts: Parts) -> str:
    return ", ".join(f"{name} {amount(x)}" for name, x in parts.items())


def check_plan(plan: Plan, machines: Machines, host: int, shared: int, folder: str, limit: str = "") -> None:
    """Raise UserError if the plan does not fit.

    host, shared: bytes of a node's memory, which `limit` limits, and of the file system of `folder`.
    """
    gpu = machines.gpu
    has = f"and has {amount(host)}{limit and f' ({limit})'}"
    need = sum(plan.training.values())
    if gpu and need > gpu:
        raise UserError(
            f"training needs about {amount(need)} on a GPU, which has {amount(gpu)}: lower "
            "train.tokens_per_micro_batch, set train.recompute, or raise parallel.tensor or parallel.pipeline"
        )

    # The longest response must fit, because otherwise it could never be completed.
    if gpu and plan.kv_per_token and not plan.rows(gpu):
        raise UserError(
            f"while an engine generates, {plan.kv_tokens(gpu)} tokens of keys and values fit on a GPU and one response "
            f"with its prompt may take {plan.context}: set train.offload = true, or lower rollout.max_tokens"
        )
    if plan.shared > shared:
        raise UserError(
            f"{folder} has room for {amount(shared)} and a node needs {amount(plan.shared)}, the current weights and "
            f"those of an update: docker run --shm-size={math.ceil(plan.shared / GIB)}g, or name another folder in "
            "memory"
        )

    # Without GPUs, everything is in host memory.
    if gpu:
        need = plan.offloaded * machines.ranks_per_node + plan.shared
        if need > host:
            raise UserError(
                f"a node needs {amount(need)} of host memory for train.offload and the engine's weights, {has}: "
                "set train.offload = false, or parallel.distributed_optimizer = true"
            )
        return
    phase, need, parts = host_need(plan, machines)
    if need > host:
        part = max(parts.keys() - {"gaps (estimate)", "libraries"}, key=lambda name: parts[name])
        raise UserError(
            f"a node needs {amount(need)} of host memory while {phase} (ranks: {machines.ranks_per_node}), {has}: "
            f"the largest part is {part}, {amount(parts[part])} of a rank: "
            f"{_REMEDIES.get(part, 'take a smaller model, fewer ranks or a GPU, or train adapters (lora.rank)')}"
        )


def host_need(plan: Plan, machines: Machines) -> tuple[str, int, Parts]:
    """Return the larger phase of ranks on CPUs, the bytes of a node in it, and the parts of a rank."""
    phases = {"training": plan.training, "generating": plan.generation}
    phase = max(phases, key=lambda name: sum(phases[name].values()))
    return phase, sum(phases[phase].values()) * machines.ranks_per_node, phases[phase]


def amount(count: int) -> str:
    """Return a number of bytes as text, in MiB or GiB."""
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"


def gpu_bytes() -> int:
    """Return the memory of this machine's smallest GPU, or 0."""
    if not torch.cuda.is_available():
        return 0
    return min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))


def plan_run(
    config: Config, shape: ModelShape, machines: Machines, prompts: PromptSizes = PromptSizes()
) -> tuple[Plan, list[str]]:
    """Return the plan of the largest pipeline stage, and its lines to print. Raises UserError if it does not fit."""
    folder = config.engine.shared_memory
    host = shared = sys.maxsize
    limit = ""
    if machines.here:
        host, free, limit = host_memory(machines.ranks_per_node)
        machines = replace(machines, free=free)
        shared = shutil.disk_usage(folder).total if Path(folder).is_dir() else shared
    plans = [plan_stage(config, shape, machines, stage, prompts) for stage in range(config.parallel.pipeline)]
    largest = max(plans, key=lambda plan: sum(plan.training.values()))
    check_plan(largest, machines, host, shared, folder, limit)
    return largest, [size_line(shape), *plan_lines(largest, machines)]


def size_line(shape: ModelShape) -> str:
    """Return the number of parameters in words, and how many of them compute a token in a mixture of experts."""
    count = sum(map(math.prod, hf_shapes(shape).values()))
    idle = 3 * shape.layers * (shape.experts - shape.chosen_experts) * shape.hidden * shape.ffn
    active = f", {(count - idle) / 1e6:,.1f} million active per token" if shape.experts else ""
    return f"model: {count / 1e6:,.1f} million parameters{active}"


def plan_for_doctor(args: argparse.Namespace) -> list[str]:
    """Return the plan of `brorl doctor CONFIG` in lines. Raises UserError if it does not fit."""
    config = load(args.config, args.overrides)
    if args.ranks < 0 or args.ranks_per_node < 0 or not 0 <= args.gpu_gib < math.inf:
        raise UserError("--ranks, --ranks-per-node and --gpu-gib must be finite and not negative")
    ranks = args.ranks or torch.cuda.device_count() or 1
    gpu = int(args.gpu_gib * GIB) or gpu_bytes()
    machines = Machines(ranks, min(args.ranks_per_node or 8, ranks), gpu, here=not args.gpu_gib)
    shape = read_shape(model_directory(config.model.path))
    check_model(config, shape.family, shape.experts, config.model.path)
    return plan_run(config, shape, machines)[1]
