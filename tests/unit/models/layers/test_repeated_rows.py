"""Selected rows and their summed gradients."""

from __future__ import annotations

import pytest
import torch

from megatron_brorl.models.layers.gpu_attention import RepeatedRows


@pytest.mark.parametrize("index", [[3, 0, 3, 5, 3, 0, 5], []], ids=["repeated", "none"])
def test_gradients_are_summed_in_the_order_of_the_index(index):
    index = torch.tensor(index, dtype=torch.int64)
    x = torch.randn(7, 2, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    grad = torch.randn(len(index), 2, 3, generator=torch.Generator().manual_seed(1))
    selected = RepeatedRows(index, 7).select(x)
    assert torch.equal(selected, x[index])
    selected.backward(grad)
    expected = torch.zeros(7, 2, 3)
    for row, row_grad in zip(index.tolist(), grad, strict=True):
        expected[row] += row_grad
    assert torch.equal(x.grad, expected)
