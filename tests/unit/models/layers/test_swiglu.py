"""Test the SwiGLU of GPUs on a CPU."""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig

from megatron_brorl.models.layers.swiglu import SwiGlu


def test_value_and_finite_differences():
    module = SwiGlu(TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1))
    gate_up = torch.randn(5, 1, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    gate, up = gate_up[..., :3], gate_up[..., 3:]
    torch.testing.assert_close(module(gate_up), gate / (1 + (-gate).exp()) * up)
    assert torch.autograd.gradcheck(module, gate_up)
