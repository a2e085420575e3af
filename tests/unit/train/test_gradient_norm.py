"""Test the replacements of Megatron's gradient norm and clipping against float64."""

from __future__ import annotations

import torch
from megatron.core.optimizer import clip_grads

from megatron_brorl.train import worker  # noqa: F401  replaces them


def test_norm_and_scaling_of_all_gradients():
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(size, generator=generator) for size in ((3,), (64, 5), (1,), (1000,))]
    flat = torch.cat([x.double().flatten() for x in gradients])
    norm, _ = clip_grads.l2_norm_impl(0, None, [gradients], False)
    torch.testing.assert_close(norm.double(), flat.norm().view(1), rtol=1e-6, atol=0)
    clip_grads.multi_tensor_scale_impl(0, None, [gradients, gradients], 0.3)
    torch.testing.assert_close(torch.cat([x.double().flatten() for x in gradients]), flat * 0.3, rtol=1e-6, atol=0)
