"""The CUDA kernel of the value loss on the cases of the CPU op."""

from __future__ import annotations

import pytest
import torch
from kernel_device import DEVICE, MARKS
from ops.value_cases import CASES, assert_agree

from megatron_brorl.ops.fused.backend import value_loss

pytestmark = MARKS


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_a_loop_over_floats(name, dtype, tolerance):
    assert_agree(CASES[name].call(value_loss, dtype, DEVICE, upstream=-2.5), CASES[name], -2.5, tolerance)
