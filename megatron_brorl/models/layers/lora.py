"""Low-rank adapters of Megatron's linear layers (LoRA; Hu et al. 2021), with the names and the initialisation of PEFT.

An adapter adds scaling * b a x to the result of its target, for example of q_proj. Megatron computes q_proj, k_proj and
v_proj in one layer, and gate_proj and up_proj. Such a layer multiplies its input by all a at once, and that product by
one matrix with all b as blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn.functional import linear

from megatron_brorl.config.schema import LoraConfig
from megatron_brorl.families.shape import ModelShape
from megatron_brorl.models.weights.layouts import WeightEntry, to_local
from megatron_brorl.models.weights.names import adapter_entries, entries, global_name
from megatron_brorl.ops.interface import compute_dtype
from megatron_brorl.ops.philox import stream_key
from megatron_brorl.parallel.grid import Grid


class Adapter(torch.nn.Module):
    """This rank's part of the adapter of one target."""

    rows: Tensor

    def __init__(self, a: Tensor, b: Tensor, rows: Tensor) -> None:
        """a: [rank, in]. b: [len(rows), rank]. rows: those of the layer's result that the adapter is added to."""
        super().__init__()
        self.a = torch.nn.Parameter(a)
        self.b = torch.nn.Parameter(b)
        self.register_buffer("rows", rows, persistent=False)


class Adapters(torch.nn.ModuleDict):
    """The adapters of one linear layer by target."""

    def __init__(self, outputs: int, scaling: float) -> None:
        """outputs: size of the layer's result on this rank."""
        super().__init__()
        self.outputs = outputs
        self.scaling = scaling

    def a(self) -> Tensor:
        """Return all a, one below the other, [targets * rank, in]."""
        return torch.cat([adapter.a for adapter in self._adapters()])

    def b(self) -> Tensor:
        """Return all b as blocks of a matrix [outputs, targets * rank] that is 0 elsewhere."""
        blocks = [
            adapter.b.new_zeros(self.outputs, adapter.b.shape[1]).index_copy(0, adapter.rows, adapter.b)
            for adapter in self._adapters()
        ]
        return torch.cat(blocks, dim=1)

    def merged(self, weight: Tensor) -> Tensor:
        """Return the layer's weight [outputs, in] plus scaling * b a, computed in at least float32."""
        dtype = compute_dtype(weight.dtype)
        with torch.no_grad():
            return (weight.to(dtype) + self.scaling * self.b().to(dtype) @ self.a().to(dtype)).to(weight.dtype)

    def _adapters(self) -> list[Adapter]:
        return cast("list[Adapter]", list(self.values()))


class MergedWeights(Mapping[str, Tensor]):
    """Parameters of a pipeline stage by global name. A weight with adapters is merged when it is read."""

    def __init__(self, actor: Any, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        modules = {global_name(actor, name): module for name, module in actor.named_modules()}
        self._adapters = {name: module for name, module in modules.items() if isinstance(module, Adapters)}

    def __getitem__(self, name: str) -> Tensor:
        adapters = self._adapters.get(name.removesuffix("weight") + "lora")
        weight = self._weights[name]
        return weight if adapters is None else adapters.merged(weight)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def add_product(out: Tensor, down: Tensor, b: Tensor) -> Tensor:
    """Return out [..., N] + down [..., K] b [N, K]^T."""
    return out + linear(down, b)


class Adapted(torch.nn.Module):
    """Base of linear layers that may have adapters. `down` is the product of this rank's input and all a."""

    weight: Tensor
    bias: Tensor | None
    lora: Adapters | None
    tp_group: Any
    sequence_parallel: bool
    add_product: Callable[[Tensor, Tensor, Tensor], Tensor] = staticmethod(add_product)
    over_ranks: Callable[[Tensor], Tensor]  # ColumnAdapted and RowAdapted define the communication of `down`.

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lora = None

    def stacked_a(self) -> Tensor | None:
        """Return all a as Adapters.a does, or None without adapters."""
        return None if self.lora is None else self.lora.a()

    def with_adapters(self, out: Tensor, down: Tensor | None) -> Tensor:
        """Return the layer's result `out` plus that of the adapters. down: None without adapters."""
        if self.lora is None or down is None:
            return out
        return self.add_product(out, self.over_ranks(down), self.lora.scaling * self.lora.b())

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return Megatron's description of the parameters, with the split of the adapters, unknown to Megatron."""
        sharded: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        if self.lora is None:
            return sharded
        state = self.lora.state_dict(prefix="lora.", keep_vars=True)
        axes = {name: p.partition_dim for name, p in state.items() if getattr(p, "tensor_model_parallel", False)}
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        return sharded | make_sharded_tensors_for_checkpoint(state, prefix, axes, sharded_offsets, **groups)


class ColumnAdapted(Adapted):
    """A column-parallel layer: every rank has all of a and its own rows of b."""

    def over_ranks(self, down: Tensor) -> Tensor:
        """Return the products `down` of the tokens of all ranks; the backward pass sums their gradients over ranks."""
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(down, group=self.tp_group)
        return copy_to_tensor_model_parallel_region(down, group=self.tp_group)


class RowAdapted(Adapted):
    """A row-parallel layer: every rank has its own columns of a and all of b."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """[T, 1, in/tp] -> [T, 1, H], and no bias."""
        out, bias = super().forward(x)
        a = self.stacked_a()
        return self.with_adapters(out, None if a is None else linear(x, a)), bias

    def over_ranks(self, down: Tensor) -> Tensor:
        """Return the sum of `down` over ranks. Fused layers also sum the parts of the layer's result with it."""
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(down, group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(down, group=self.tp_group)


class ColumnLinear(ColumnAdapted, ColumnParallelLinear):
    """ColumnParallelLinear with adapters, if any."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """[T, 1, in] -> [T, 1, out/tp] and the bias, if Megatron adds it later."""
        out, bias = super().forward(x, *args, **kwargs)
        a = self.stacked_a()
        return self.with_adapters(out, None if a is None else linear(x, a)), bias


class RowLinear(RowAdapted, RowParallelLinear):
    """RowParallelLinear with adapters, if any."""


def mlp_submodules(layer: Any) -> Any:
    """Return the submodules of the MLP in the specification of a layer."""
    # Megatron-Core 0.19 describes the MLP with a functools.partial, 0.16 with a ModuleSpec.
    return layer.mlp.keywords["submodules"] if isinstance(layer.mlp, partial) else layer.mlp.submodules


def add_adapters(actor: Any, lora: LoraConfig, seed: int) -> None:
    """Freeze a pipeline stage (models.gpt.Actor) and add adapters to it whose results are 0, because every b is.

    The values of a depend on the seed, the layer and the target, not on the ranks.
    """
    shape, grid = actor.shape, actor.grid
    actor.requires_grad_(False)
    modules = {global_name(actor, name): module for name, module in actor.named_modules()}
    weights = {entry.megatron: entry for entry in entries(shape, grid.pp_size)}
    table = [entry for entry in adapter_entries(shape, grid.pp_size, lora) if entry.stage == grid.pp_rank]
    for a_entry, b_entry in zip(table[::2], table[1::2], strict=True):
        name, _, target = a_entry.megatron.removesuffix(".a").partition(".lora.")
        weight = weights[f"{name}.weight"]
        rows = _rows(weight, target, shape, grid)
        # Kaiming-uniform as in PEFT, which is +-1 / sqrt(in).
        bound = a_entry.hf_shapes[0][1] ** -0.5
        generator = torch.Generator().manual_seed(stream_key(seed, a_entry.hf[0]))
        full = torch.empty(a_entry.hf_shapes[0]).uniform_(-bound, bound, generator=generator)
        a = to_local(a_entry, [full], shape.kv_heads, grid.tp_rank, grid.tp_size)
        adapter = Adapter(a.contiguous(), torch.zeros(len(rows), lora.rank), rows)
        # Read by megatron.core.distributed.finalize_model_grads.
        for entry, parameter in ((a_entry, adapter.a), (b_entry, adapter.b)):
            parameter.sequence_parallel = grid.sequence_parallel and entry.layout == "whole"  # type: ignore[attr-defined]
        layer = modules[name]
        if layer.lora is None:
            layer.lora = Adapters(len(layer.weight), lora.alpha / lora.rank)
        layer.lora[target] = adapter


def _rows(weight: WeightEntry, target: str, shape: ModelShape, grid: Grid) -> Tensor:
    """Return the rows of this rank's part of a weight that belong to a target, in ascending order."""
    # Fill each Hugging Face tensor with its index. After the split, a row's value names the tensor that it came from.
    indices = [torch.full((rows, grid.tp_size), i) for i, (rows, _) in enumerate(weight.hf_shapes)]
    local = to_local(weight, indices, shape.kv_heads, grid.tp_rank, grid.tp_size)
    targets = [name.split(".")[-2] for name in weight.hf]
    return (local[:, 0] == targets.index(target)).nonzero().squeeze(1)
