"""One rank's share of a model with its optimizer, driven through Megatron's pipeline schedule.

The only file that speaks to Megatron's schedule, DDP and optimizer, and the only one where a loss is a closure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_brorl.config import OptimConfig
from megatron_brorl.hf_config import ModelShape
from megatron_brorl.models import fp8, hf_io, hf_names
from megatron_brorl.models.gpt import Head, build_actor
from megatron_brorl.ops.checksum import Sealed
from megatron_brorl.parallel import device
from megatron_brorl.parallel.batch import LEAST_GAIN, Packed, pack, token_gain
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.reshard.execute import stream
from megatron_brorl.reshard.plan import make_plan
from megatron_brorl.train.offload import Offload

# (batch, LM head at its predicting positions) -> (scalar loss, values that the caller gets back)
LossFunction = Callable[[Packed, Head], tuple[Tensor, Any]]


@dataclass(frozen=True)
class Update:
    """What one optimizer step did."""

    grad_norm: float  # before clipping, over the whole model
    applied: bool  # False where the gradient was not finite: weights and optimizer state are then untouched


class Worker:
    """The actor's stage on this rank."""

    def __init__(
        self,
        shape: ModelShape,
        grid: Grid,
        dtype: torch.dtype,
        tokens_per_micro_batch: int,
        recompute: bool = False,
        optim: OptimConfig | None = None,
        distributed_optimizer: bool = False,
        ops: str = "fused",
        share_prompt: bool = True,
        fields: Mapping[str, Any] | None = None,
        overlap_grad_reduce: bool = False,
        offload: bool = False,
    ) -> None:
        """ops: config key ops.implementation. share_prompt: config key train.share_prompt. fields: of Megatron's
        TransformerConfig, beside what models.gpt chooses. offload: `away` has an effect (config key train.offload)."""
        self.shape, self.grid, self.dtype = shape, grid, dtype
        self.tokens_per_micro_batch = tokens_per_micro_batch
        self.optim, self.ops = optim, ops
        self.share_prompt = share_prompt
        self.actor = build_actor(shape, grid, dtype, recompute, ops, fields)
        self._multiple = (grid.tensor if grid.sequence_parallel else 1) * (fp8.ALIGN if self.actor.config.fp8 else 1)
        self._weights = Offload(lambda: (*self.actor.parameters(), *self.actor.buffers())) if offload else None
        self._state = Offload(self._optimizer_tensors, self._gradients) if offload and optim is not None else None
        table = hf_names.entries(shape, grid.pipeline, self.actor.fused_norms)
        self.plan = make_plan(table, shape.kv_heads, grid.tensor, grid.pipeline, dtype.itemsize)
        self.model: Any = self.actor
        if optim is not None:
            with device.bridge():
                self._make_trainable(optim, distributed_optimizer, overlap_grad_reduce)

    def _make_trainable(self, optim: OptimConfig, distributed_optimizer: bool, overlap_grad_reduce: bool) -> None:
        config = self.actor.config
        self.model = DistributedDataParallel(
            config=config,
            ddp_config=DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=distributed_optimizer,
                overlap_grad_reduce=overlap_grad_reduce,
            ),
            module=self.actor,
        )
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=optim.lr,
                weight_decay=optim.weight_decay,
                adam_beta1=optim.betas[0],
                adam_beta2=optim.betas[1],
                adam_eps=optim.eps,
                clip_grad=optim.clip_grad,
                bf16=self.dtype == torch.bfloat16,
                params_dtype=self.dtype,
                use_distributed_optimizer=distributed_optimizer,
            ),
            [self.model],
        )
        # Losses carry their global divisor already: gradients are only summed.
        config.finalize_model_grads_func = lambda models, _tokens, **kwargs: finalize_model_grads(models, **kwargs)
        config.no_sync_func = self.model.no_sync

    def load_hf(self, directory: str | Path) -> None:
        """Fill the weights from a Hugging Face directory (and the optimizer's fp32 masters from them)."""
        hf_io.load(self.actor, self.shape, self.grid, directory, self.actor.fused_norms)
        if self.optim is not None:
            self.optimizer.reload_model_params()

    def hf_tensors(self) -> Iterator[Sealed]:
        """The full weights as (Hugging Face name, tensor), with checksums, the same on every rank; a collective."""
        if self._weights:
            self._weights.back()
        named = hf_names.global_parameters(self.actor)
        plain = {n: dequantize_fp8_tensor(p) if is_float8tensor(p) else p for n, p in named.items()}
        return stream(self.plan, plain, self.grid, self.dtype)

    def away(self, weights: bool = True) -> None:
        """Move the optimizer's state, and the weights, to host memory; gradients are dropped. Training, scoring and
        streaming bring back what they need."""
        for part in (self._state, self._weights if weights else None):
            if part:
                part.away()
        if device.on_gpu() and self._weights:
            torch.cuda.empty_cache()  # for the engine, which is another process

    def back(self) -> None:
        """Undo `away`, for whoever reads weights or optimizer directly."""
        for part in (self._weights, self._state):
            if part:
                part.back()

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        """Moments and fp32 masters; where the weights are their own masters, without those."""
        own = {p.untyped_storage().data_ptr() for p in self.actor.parameters()}
        for part in self.optimizer.chained_optimizers:
            masters = (p for group in part.param_groups for p in group["params"])
            for x in (*masters, *(x for state in part.optimizer.state.values() for x in state.values())):
                if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in own:
                    yield x

    def _gradients(self) -> list[Tensor]:
        return [buffer.grad_data for buffer in (*self.model.buffers, *self.model.expert_parallel_buffers)]

    def log_probs(self, prompts: Sequence[Tensor], responses: Sequence[Tensor], temperature: float) -> list[Tensor]:
        """Log-probabilities [G] float32 of every response, in row order, on every rank of the model-parallel group."""
        result = [torch.empty(len(r)) for r in responses]
        if result:

            def collect(batch: Packed, head: Head) -> tuple[Tensor, Any]:
                log_probs, _ = head.log_probs()
                for row, values in batch.split(log_probs.float().cpu()):
                    result[row] = values
                return log_probs.sum(), None

            with torch.no_grad():
                self._run(self._pack(prompts, responses), collect, temperature, forward_only=True)
            if self.grid.pipeline > 1:
                flat = torch.cat(result).to(device.default_device())
                source = dist.get_global_rank(self.grid.groups.pp, self.grid.pipeline - 1)
                dist.broadcast(flat, source, group=self.grid.groups.pp)
                result = list(flat.cpu().split([len(r) for r in responses]))
        return result

    def train(
        self, prompts: Sequence[Tensor], responses: Sequence[Tensor], loss: LossFunction, temperature: float, lr: float
    ) -> tuple[Update, list[Any]]:
        """One optimizer step on this data-parallel rank's rows; returns it and what `loss` returned per micro-batch.

        `loss` must divide by the size of the global batch. Values come back on the last pipeline stage alone.
        """
        self.back()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        values = self._run(self._pack(prompts, responses), loss, temperature)
        return self._step(lr), values

    def _step(self, lr: float) -> Update:
        with device.bridge():
            self.optimizer.prepare_grads()
            norm = float(self.optimizer.get_grad_norm())
            if not math.isfinite(norm):
                return Update(norm, applied=False)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            if self.optim is not None and self.optim.clip_grad:
                for optimizer in self.optimizer.chained_optimizers:
                    clip_grad_by_total_norm_fp32(optimizer.get_parameters(), self.optim.clip_grad, norm)
            self.optimizer.step_with_ready_grads()
        return Update(norm, applied=True)

    def tokens(self, prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> dict[str, float]:
        """Tokens of these rows, each with its prompt ("plain"), and those of shared streams ("computed").

        The latter count a prompt once; one that spans micro-batches passes the model once in each.
        """
        plain = float(sum(map(len, prompts)) + sum(len(r) - 1 for r in responses))
        gain = token_gain(prompts, responses) if self.share_prompt else 1.0
        return {"plain": plain, "computed": plain / gain if gain >= LEAST_GAIN else plain}

    def _pack(self, prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> list[Packed]:
        return pack(prompts, responses, self.tokens_per_micro_batch, self._multiple, self.share_prompt)

    def _run(
        self, batches: list[Packed], loss: LossFunction, temperature: float, forward_only: bool = False
    ) -> list[Any]:
        if self._weights:
            self._weights.back()
        with device.bridge():
            values = get_forward_backward_func()(
                forward_step_func=partial(_forward_step, loss=loss, temperature=temperature),
                data_iterator=iter(batches),
                model=[self.model],
                num_microbatches=len(batches),
                seq_length=max(len(b.input_ids) for b in batches),
                micro_batch_size=1,
                forward_only=forward_only,
            )
        return list(values)


def _forward_step(batches: Iterator[Packed], model: Any, loss: LossFunction, temperature: float) -> Any:
    """What Megatron's schedule calls per micro-batch: (this stage's output, output -> (loss, count, values))."""
    batch = next(batches)
    actor = model.module if isinstance(model, DistributedDataParallel) else model

    def head(hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
        value, figures = loss(batch, actor.head(hidden, batch, temperature))
        return value, torch.ones((), dtype=torch.int), figures

    return actor.forward_packed(batch, model), head
