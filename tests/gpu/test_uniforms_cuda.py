"""The CUDA kernel of the random numbers against the reference."""

from __future__ import annotations

import torch
from kernel_device import DEVICE, MARKS

from megatron_brorl.ops import philox

pytestmark = MARKS


def test_uniforms_equal_the_reference_bit_for_bit():
    g = torch.Generator().manual_seed(0)
    keys = torch.randint(0, 2**63 - 1, (300,), generator=g)
    index, position = torch.randint(0, 2**32, (2, 300), generator=g)
    got = torch.ops.brorl.uniforms(*(x.to(DEVICE) for x in (keys, index, position)))
    assert torch.equal(got.cpu(), philox.uniforms(keys, index, position))
