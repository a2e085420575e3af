"""SwiGLU by torch's element-wise ops, for GPUs without Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.functional import silu


class SwiGlu(MegatronModule):
    """The MLP's activation: gate_up [..., 2 K] -> silu(gate) * up [..., K]."""

    def forward(self, gate_up: Tensor) -> Tensor:
        return _SwiGlu.apply(gate_up)


class _SwiGlu(torch.autograd.Function):
    """silu(gate) * up. autograd would keep silu(gate), and concatenate the gradients of the halves."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        gate, up = ctx.saved_tensors[0].chunk(2, dim=-1)
        gradient = torch.empty_like(ctx.saved_tensors[0])
        of_gate, of_up = gradient.chunk(2, dim=-1)
        torch.mul(silu(gate), upstream[0], out=of_up)
        torch.mul(upstream[0], up, out=of_gate)
        torch.ops.aten.silu_backward(of_gate, gate, grad_input=of_gate)
        return gradient
