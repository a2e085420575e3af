"""The critic of one pipeline stage: the actor's model with a scalar value head in place of its LM head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_brorl.families.shape import ModelShape
from megatron_brorl.models.gpt import Actor, check_layout, mark_sharded, predicting, transformer_config
from megatron_brorl.models.weights import names
from megatron_brorl.ops.backend import Backend
from megatron_brorl.ops.interface import compute_dtype
from megatron_brorl.parallel import cpu_bridge
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.parallel.packing import Packed


class ValueHead(MegatronModule):
    """Linear value head: hidden [R, H] -> values [R]. Every tensor-parallel rank computes all values."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        # Megatron expects the last layer of a model to have a matrix of this name.
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size))

    def forward(self, hidden: Tensor) -> Tensor:
        dtype = compute_dtype(hidden.dtype)
        return (hidden.to(dtype) @ self.weight.to(dtype).t()).squeeze(-1)


class Critic(Actor):
    """One pipeline stage of the critic. The value head of the last stage is never tied to the embedding."""

    def __init__(self, shape: ModelShape, config: TransformerConfig, grid: Grid, ops: Backend) -> None:
        super().__init__(replace(shape, tied=False), config, grid, ops)
        if self.post_process:
            self.output_layer = ValueHead(config)

    def values(self, hidden: Tensor, batch: Packed) -> Tensor:
        """Return values [R] at the batch's predicting positions, from hidden [T, 1, H] (last stage only)."""
        return self.output_layer(predicting(hidden, batch))


def build_critic(
    shape: ModelShape,
    grid: Grid,
    dtype: torch.dtype,
    ops: Backend,
    recompute: bool = False,
    fields: Mapping[str, Any] | None = None,
) -> Critic:
    """Build this rank's stage with an uninitialised body and a value head of zeros.

    fields: see models.gpt.transformer_config.
    """
    check_layout(shape, grid.tp_size, grid.pp_size)
    with cpu_bridge.bridge():
        critic = Critic(shape, transformer_config(shape, grid, dtype, recompute, ops, fields), grid, ops)
    mark_sharded(critic, names.entries(body(shape), grid.pp_size, critic.uses_te))
    return critic.to(device=cpu_bridge.default_device(), dtype=dtype)


def body(shape: ModelShape) -> ModelShape:
    """Return the shape without an LM head, so that loading ignores the head that a directory may hold."""
    return replace(shape, tied=True)
