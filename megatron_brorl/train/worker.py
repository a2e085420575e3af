"""One rank's share of a model with its optimizer; the only file that calls Megatron's schedule, DDP and optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.fp8_utils import dequantize_fp8_tensor, get_fp8_align_size, is_float8tensor
from megatron.core.optimizer import OptimizerConfig, clip_grads, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import local_multi_tensor_l2_norm
from torch import Tensor

from megatron_brorl.checkpoints import hugging_face
from megatron_brorl.config.schema import LoraConfig, OptimConfig
from megatron_brorl.errors import UserError
from megatron_brorl.families.shape import ModelShape
from megatron_brorl.models.gpt import Actor, Head, build_actor
from megatron_brorl.models.layers.lora import MergedWeights
from megatron_brorl.models.weights import names
from megatron_brorl.models.weights.stream import make_buckets, stream
from megatron_brorl.ops.backend import Backend
from megatron_brorl.ops.checksum import ChecksummedTensor
from megatron_brorl.ops.interface import compute_dtype
from megatron_brorl.parallel import cpu_bridge
from megatron_brorl.parallel.collectives import all_gather, all_reduce_max, all_reduce_tensor
from megatron_brorl.parallel.flops import forward_flops, training_flops
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.parallel.packing import Packed, pack, split_for_rank
from megatron_brorl.tracking.timeline import span

# (batch, output of the head at its predicting positions) -> (scalar loss, values that the caller receives). The output
# is models.gpt.Head for an actor and the values [R] for a critic.
LossFunction = Callable[[Packed, Any], tuple[Tensor, Any]]
# (hidden states [T, 1, H] of the last stage, batch) -> the output of the head
MakeHead = Callable[[Tensor, Packed], Any]


def _l2_norm(_chunk: int, _flag: Tensor, tensors: list[list[Tensor]], _per_tensor: bool) -> tuple[Tensor, None]:
    return torch.stack(torch._foreach_norm(tensors[0])).norm().float().view(1), None


def _scale(_chunk: int, _flag: Tensor, tensors: list[list[Tensor]], factor: float) -> None:
    torch._foreach_mul_(tensors[0], factor)  # Megatron passes the gradients as input and as output


# Without Transformer Engine and apex, Megatron waits for the norm of each gradient and scales them one by one.
if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
    clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_impl = _l2_norm, _scale


@dataclass(frozen=True)
class OptimizerStep:
    """The result of one optimizer step."""

    grad_norm: float  # before clipping, over the whole model
    applied: bool  # False if the gradient was not finite; weights and optimizer state have not changed then


@dataclass(frozen=True)
class StageOptions:
    """Settings of a pipeline stage, the same for actor and critic."""

    tokens_per_micro_batch: int
    ops: Backend
    dtype: torch.dtype = torch.float32
    share_prompt: bool = True  # config key train.share_prompt
    recompute: bool = False  # all activations, in the backward pass
    offload: bool = False  # config key train.offload
    distributed_optimizer: bool = False  # config key parallel.distributed_optimizer
    overlap: bool = False  # config key parallel.overlap
    fields: Mapping[str, Any] | None = None  # further fields of Megatron's TransformerConfig
    freeze_router: bool = False  # config key train.freeze_router
    lora: LoraConfig | None = None  # train only adapters of the actor
    seed: int = 0  # of new adapters


class Offload:
    """Moves tensors that generation does not need to host memory, and back bit for bit. Views of them stay valid."""

    def __init__(self, kept: Callable[[], Iterable[Tensor]], dropped: Callable[[], Iterable[Tensor]] = tuple) -> None:
        """kept: tensors whose bytes are restored. dropped: those that reload leaves undefined. `tuple` yields none."""
        self._kept = kept
        self._dropped = dropped
        self._host: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._empty: list[tuple[torch.UntypedStorage, int]] = []

    def offload(self) -> None:
        """Copy the bytes to host memory and free the device memory, unless that has been done."""
        if self._host or self._empty:
            return
        for storage in _storages(self._kept()):
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
            host.copy_(_bytes(storage))
            self._host.append((storage, host))
        self._empty = [(storage, storage.nbytes()) for storage in _storages(self._dropped())]
        for storage, _ in (*self._host, *self._empty):
            storage.resize_(0)

    def reload(self) -> None:
        """Allocate device memory and copy the bytes back."""
        for storage, host in self._host:
            storage.resize_(len(host))
            _bytes(storage).copy_(host)
        for storage, size in self._empty:
            storage.resize_(size)
        self._host = []
        self._empty = []


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the distinct storages that are not empty."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors}
    return [storage for storage in storages.values() if storage.nbytes()]


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _Neighbours(P2PCommunicator):
    """Exchanges activations and their gradients with the next and previous stages.

    All stages pack the same micro-batches and receive them in order. So no stage sends the shape of a tensor, which
    the receiver would read on the host.
    """

    def __init__(self, module: Actor, batches: Sequence[Packed]) -> None:
        config = module.config
        super().__init__(module.grid.groups.pp, config)
        ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
        shapes = [(len(batch.input_ids) // ranks, 1, config.hidden_size) for batch in batches]
        self._from_previous, self._from_next = iter(shapes), iter(shapes)

    def _communicate_shapes(self, _send_next: Any, _send_previous: Any, recv_previous: bool, recv_next: bool) -> Any:
        """Return the shapes of the tensors to receive from the previous and the next stage."""
        return recv_previous and next(self._from_previous), recv_next and next(self._from_next)


class Stage:
    """This rank's pipeline stage of a model. Actor and critic differ only in their heads."""

    shape: ModelShape  # without the head
    outputs: int  # of the head, per token
    adapter_weights = 0  # number of weights of the adapters on all ranks
    steps_taken = 0  # optimizer steps of this process

    def __init__(self, module: Actor, options: StageOptions, optim: OptimConfig | None) -> None:
        """optim: None for a stage that is not trained."""
        self.module = module
        self.grid = module.grid
        self.options = options
        self.optim = optim
        self.model: Any = module  # in DistributedDataParallel if it is trained
        self._segments_of = 2 * self.grid.cp_size if self.grid.cp_size > 1 else 1  # pads segments to a multiple of it
        align = get_fp8_align_size(module.config.fp8_recipe) if module.config.fp8 else 1
        self._multiple_of = self._segments_of * (self.grid.tp_size if self.grid.sequence_parallel else 1) * align
        self._max_tokens = options.tokens_per_micro_batch * self.grid.cp_size  # of a micro-batch on all ranks
        self._weights = Offload((lambda: (*module.parameters(), *module.buffers())) if options.offload else tuple)
        self._state = Offload(self._optimizer_tensors if options.offload and optim is not None else tuple)
        # Gradients need no copy in host memory, because every update starts from zeros.
        self._gradients = Offload(kept=tuple, dropped=self._gradient_buffers if optim is not None else tuple)
        if optim is not None:
            if options.freeze_router:
                for layer in module.decoder.layers:
                    layer.mlp.router.requires_grad_(False)
            with cpu_bridge.bridge():
                self._make_trainable(optim)

    def _make_trainable(self, optim: OptimConfig) -> None:
        config = self.module.config
        options = self.options
        # Megatron gathers weights when a module is called, which adapters are not.
        overlap_gather = options.overlap and options.distributed_optimizer and options.lora is None
        self.model = DistributedDataParallel(
            config=config,
            ddp_config=DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=options.distributed_optimizer,
                overlap_grad_reduce=options.overlap,
                overlap_param_gather=overlap_gather,
            ),
            module=self.module,
        )
        # Transformer Engine then adds gradients to main_grad in its products. The configuration's flag needs Apex.
        for layer in self.module.modules():
            if hasattr(layer, "fuse_wgrad_accumulation"):
                layer.fuse_wgrad_accumulation = layer.weight.requires_grad

        # Every step sets the learning rate. Here it is the same in all runs, because Megatron-Core 0.19 uses it to find
        # the parameter groups of a checkpoint, and a resumed run may change optim.lr.
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=0.0,
                weight_decay=optim.weight_decay,
                adam_beta1=optim.betas[0],
                adam_beta2=optim.betas[1],
                adam_eps=optim.eps,
                clip_grad=optim.clip_grad,
                bf16=options.dtype == torch.bfloat16,
                params_dtype=options.dtype,
                use_distributed_optimizer=options.distributed_optimizer,
                overlap_param_gather=overlap_gather,
            ),
            [self.model],
            use_gloo_process_groups=False,  # Megatron's own checkpoints would need them
        )

        # Losses contain the global divisor, so gradients are only summed.
        config.finalize_model_grads_func = _reduce_gradients
        config.no_sync_func = self.model.no_sync

    def offload(self, weights: bool = True) -> None:
        """Free the gradients and, with train.offload, move optimizer state and weights to host memory.

        Training, scoring and weight sync move the tensors that they use back. weights: move the weights, too.
        """
        self._finish_gather()
        for part in (self._gradients, self._state, *([self._weights] if weights else [])):
            part.offload()
        cpu_bridge.release_freed_memory()  # for the engine

    def reload(self) -> None:
        """Undo `offload`, for callers that read weights or optimizer state directly."""
        self._finish_gather()
        self._reload()

    def _load(self, shape: ModelShape, directory: str | Path, skipped: Sequence[str]) -> None:
        """Fill the weights, except `skipped`, and the optimizer's float32 masters from a Hugging Face directory."""
        # Weights in FP8 or bfloat16 are rounded, so masters made from them would differ from the file.
        keep_values = self.options.distributed_optimizer and self.options.dtype != torch.float32
        read = hugging_face.load(self.module, shape, directory, skipped, keep_values)
        if self.optim is not None:
            values = {**dict(self.module.named_parameters()), **read} if read else None
            # A ChainedOptimizer would pass the tensors only to its first optimizer. Experts have one of their own.
            for optimizer in self.optimizer.chained_optimizers:
                optimizer.reload_model_params(state_dict=values)

    def require_finite(self, what: str, then: str) -> None:
        """Raise UserError on all ranks if a weight of any rank is NaN or infinite. Collective.

        what, then: the parts of the message before and after the weight's name.
        """
        named = self._named()
        # The extremes of a tensor are NaN if any value is, and need no copy of it. Read the results of all tensors
        # together, because the device would idle after the read of each.
        plain = [dequantize_fp8_tensor(p) if is_float8tensor(p) else p.detach() for p in named.values()]
        extremes = [torch.stack(torch.aminmax(x)) if x.numel() else x.new_zeros(2) for x in plain]
        finite = torch.stack(extremes).isfinite().all(dim=1).tolist()
        broken = [name for name, is_finite in zip(named, finite, strict=True) if not is_finite]
        names_of_all = list(dict.fromkeys(name for part in all_gather(broken) for name in part))
        if names_of_all:
            others = f" (and {len(names_of_all) - 1} other tensors)" if len(names_of_all) > 1 else ""
            raise UserError(f"{what}: weights that are not finite: {names_of_all[0]}{others}; {then}")

    def _named(self) -> Mapping[str, Tensor]:
        """Return the parameters by global name, in device memory and gathered."""
        self._finish_gather()
        self._weights.reload()
        return names.global_parameters(self.module)

    def _reload(self) -> None:
        for part in (self._weights, self._state, self._gradients):
            part.reload()

    def _finish_gather(self) -> None:
        """Gather the weights that overlap_param_gather would gather in the next forward pass."""
        if isinstance(self.model, DistributedDataParallel) and self.model.ddp_config.overlap_param_gather:
            for bucket in (*self.model.bucket_groups, *self.model.expert_parallel_bucket_groups):
                bucket.finish_param_sync(skip_next_bucket_dispatch=True)

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        """Yield moments and float32 masters, without masters that are the weights themselves."""
        weight_storages = {p.untyped_storage().data_ptr() for p in self.module.parameters()}
        for chained in self.optimizer.chained_optimizers:
            masters = (p for group in chained.param_groups for p in group["params"])
            for x in (*masters, *(value for state in chained.optimizer.state.values() for value in state.values())):
                if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in weight_storages:
                    yield x

    def _gradient_buffers(self) -> list[Tensor]:
        return [buffer.grad_data for buffer in (*self.model.buffers, *self.model.expert_parallel_buffers)]

    def train(
        self,
        prompts: Sequence[Tensor],
        responses: Sequence[Tensor],
        loss: LossFunction,
        head: MakeHead,
        lr: float,
        routes: Sequence[Tensor] | None = None,
    ) -> tuple[OptimizerStep, list[Any]]:
        """Take one optimizer step on this replica's rows; return it and the values of `loss` per micro-batch.

        `loss` must divide by the size of the global batch. Only the last stage has values. routes: see packing.pack.
        """
        with span("optimizer step") as recorded:
            batches = self.micro_batches(prompts, responses, routes)
            flops = training_flops(self.shape, batches, self.outputs, self.adapter_weights)
            recorded["flops"] = flops / self.grid.mp_size
            self._reload()
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            values = self._run(batches, loss, head)
            return self._step(lr), values

    def _per_token(
        self,
        prompts: Sequence[Tensor],
        responses: Sequence[Tensor],
        head: MakeHead,
        per_token: Callable[[Any], Tensor],
        routes: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """Return per_token(output of the head) of every row, [G] float32 each, on all ranks of the replica.

        per_token returns [R], without gradient. The rows are on the device, and the host does not wait for it.
        """
        lengths = [len(r) for r in responses]
        result = list(torch.zeros(sum(lengths), device=cpu_bridge.default_device()).split(lengths))
        if not result and self.grid.ep_size == 1:
            return result

        def collect(batch: Packed, output: Any) -> tuple[Tensor, Any]:
            flat = per_token(output)
            for row, values in batch.split(flat.float()):
                result[row] = values
            return flat.sum(), None

        with torch.no_grad(), span("forward") as recorded:
            batches = self.micro_batches(prompts, responses, routes)
            flops = forward_flops(self.shape, batches, self.outputs, self.adapter_weights)
            recorded["flops"] = flops / self.grid.mp_size
            self._run(batches, collect, head, forward_only=True)
        if result and (self.grid.pp_size > 1 or self.grid.cp_size > 1):
            flat = torch.cat(result)
            dist.all_reduce(flat, group=self.grid.groups.cp)  # each rank has its own tokens, and zeros
            source = dist.get_global_rank(self.grid.groups.pp, self.grid.pp_size - 1)
            dist.broadcast(flat, source, group=self.grid.groups.pp)
            result = list(flat.split(lengths))
        return result

    def _step(self, lr: float) -> OptimizerStep:
        optim = self.optim
        assert optim is not None
        with cpu_bridge.bridge():
            self.optimizer.prepare_grads()
            norm = float(self.optimizer.get_grad_norm())
            if not math.isfinite(norm):
                return OptimizerStep(norm, applied=False)
            for group in self.optimizer.param_groups:
                # The groups of a checkpoint have the settings of an earlier run.
                group["lr"] = lr
                group["eps"] = optim.eps
                # wd_mult is 0 for one-dimensional parameters. Megatron's scheduler, which is not used, would apply it.
                group["weight_decay"] = optim.weight_decay if group["wd_mult"] else 0.0
                if "fused" in group:  # torch's AdamW then takes one pass over memory on a CPU instead of a dozen
                    group["fused"] = True
            if optim.clip_grad:
                for optimizer in self.optimizer.chained_optimizers:
                    clip_grads.clip_grad_by_total_norm_fp32(optimizer.get_parameters(), optim.clip_grad, norm)
            self.optimizer.step_with_ready_grads()
        self.steps_taken += 1
        return OptimizerStep(norm, applied=True)

    def micro_batches(
        self, prompts: Sequence[Tensor], responses: Sequence[Tensor], routes: Sequence[Tensor] | None = None
    ) -> list[Packed]:
        """Pack rows of [tokens] each into micro-batches, with this rank's tokens of them in context parallelism.

        With expert parallelism, ranks exchange tokens in every micro-batch. This is then a collective of all replicas,
        and the ranks with fewer micro-batches get additional ones without rows.
        """
        packing = self._max_tokens, self._multiple_of, self.options.share_prompt, self._segments_of
        batches = pack(prompts, responses, *packing, routes)
        if self.grid.ep_size > 1:
            largest = all_reduce_max({"batches": float(len(batches))}, self.grid.groups.dp)["batches"]
            batches += pack([], [], *packing) * (int(largest) - len(batches))
        if self.grid.cp_size == 1:
            return batches
        return [split_for_rank(batch, self.grid.groups.cp.rank(), self.grid.cp_size) for batch in batches]

    def _run(self, batches: list[Packed], loss: LossFunction, head: MakeHead, forward_only: bool = False) -> list[Any]:
        self._weights.reload()
        if self.shape.experts:
            self._finish_gather()  # The modules of experts are not called, so they would not gather their weights.

        def gathered(hidden: Tensor, batch: Packed) -> Any:
            self._finish_gather()  # The head's module is not called, so it would not gather its weight.
            return head(hidden, batch)

        with cpu_bridge.bridge():
            values = get_forward_backward_func()(
                forward_step_func=partial(_forward_step, loss=loss, head=gathered),
                data_iterator=iter(batches),
                model=[self.model],
                num_microbatches=len(batches),
                seq_length=max(len(b.input_ids) for b in batches),
                micro_batch_size=1,
                forward_only=forward_only,
                p2p_communicator=_Neighbours(self.module, batches),
                pg_collection=self.grid.groups,
            )
        return list(values)


class Worker(Stage):
    """The actor's pipeline stage on this rank."""

    def __init__(self, shape: ModelShape, grid: Grid, options: StageOptions, optim: OptimConfig | None = None) -> None:
        self.shape = shape
        self.outputs = shape.vocab
        o = options
        self.actor = build_actor(shape, grid, o.dtype, o.ops, o.recompute, o.fields, o.lora, o.seed)
        table = names.entries(shape, grid.pp_size, self.actor.uses_te)
        self.buckets = make_buckets(table, o.dtype.itemsize, expert_ranks=grid.ep_size)
        self.adapter_table = names.adapter_entries(shape, grid.pp_size, o.lora) if o.lora else []
        self.adapter_weights = sum(math.prod(entry.hf_shapes[0]) for entry in self.adapter_table)
        super().__init__(self.actor, options, optim)

    def load_hf(self, directory: str | Path) -> None:
        """Fill the weights, except adapters, and the optimizer's float32 masters from a Hugging Face directory."""
        self._load(self.shape, directory, [entry.megatron for entry in self.adapter_table])

    def hf_tensors(self) -> Iterator[ChecksummedTensor]:
        """Yield the full weights as (Hugging Face name, tensor) with checksums, the same on every rank. Collective.

        Adapters are merged into the weights.
        """
        plain = {n: dequantize_fp8_tensor(p) if is_float8tensor(p) else p for n, p in self._named().items()}
        merged = MergedWeights(self.actor, plain)
        return stream(self.buckets, self.shape.kv_heads, merged, self.grid, self.options.dtype)

    def adapter_tensors(self) -> Iterator[ChecksummedTensor]:
        """Yield the full matrices of all adapters as `hf_tensors` does, with the names of PEFT's files."""
        buckets = make_buckets(self.adapter_table, self.options.dtype.itemsize)
        return stream(buckets, self.shape.kv_heads, self._named(), self.grid, self.options.dtype)

    def log_probs(
        self,
        prompts: Sequence[Tensor],
        responses: Sequence[Tensor],
        temperature: float,
        routes: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """Return log-probabilities [G] float32 of every response, in row order, on all ranks of the replica.

        They are on the device. routes: the experts to use, see parallel.packing.pack.
        """
        return self._per_token(prompts, responses, self.head(temperature), lambda head: head.log_probs()[0], routes)

    def last_logits(self, prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> Tensor | None:
        """Return the logits [B, V] on the CPU from which the last token of each of B > 0 responses is drawn.

        Collective of the replica; None on all pipeline stages but the last.
        """
        logits_of_row: dict[int, Tensor] = {}

        def collect(batch: Packed, head: Head) -> tuple[Tensor, Any]:
            rows, positions = batch.last_tokens()
            logits_of_row.update(zip(rows, head.logits(positions).cpu(), strict=True))
            return head.hidden.sum(), None

        with torch.no_grad():
            self._run(self.micro_batches(prompts, responses), collect, self.head(temperature=1.0), forward_only=True)
        if not self.grid.last_stage:
            return None
        table = torch.zeros(len(prompts), self.shape.vocab, dtype=compute_dtype(self.options.dtype))
        for row, logits in logits_of_row.items():
            table[row] = logits
        return all_reduce_tensor(table, group=self.grid.groups.cp)  # each rank has its own rows, and zeros

    def head(self, temperature: float) -> MakeHead:
        """Return the LM head, which computes log-probabilities at this temperature."""
        return lambda hidden, batch: self.actor.head(hidden, batch, temperature)


def _reduce_gradients(models: list[Any], _tokens: Any, **kwargs: Any) -> None:
    """Reduce the gradients after the last micro-batch; its time is communication and waiting for other ranks."""
    cpu_bridge.wait()
    with span("reduce gradients"):
        finalize_model_grads(models, **kwargs)
        cpu_bridge.wait()


def _forward_step(batches: Iterator[Packed], model: Any, loss: LossFunction, head: MakeHead) -> Any:
    """Run a micro-batch for Megatron's schedule; return (this stage's output, output -> (loss, count, values))."""
    batch = next(batches).on_device()
    module = model.module if isinstance(model, DistributedDataParallel) else model

    def end(hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
        value, metrics = loss(batch, head(hidden, batch))
        return value, torch.ones((), dtype=torch.int), metrics

    return module.forward_packed(batch, model), end
