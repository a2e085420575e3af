"""Offloaded memory: the same bits and views after a reload, and no device memory in between."""

from __future__ import annotations

import torch

from megatron_brorl.train.offload import Offload


def test_bytes_and_views_are_restored():
    base = torch.randn(1000)
    views = [base[10:20], base.view(10, 100)[3], torch.arange(5, dtype=torch.int64), torch.empty(0)]
    dropped = torch.ones(64)
    before = [v.clone() for v in views]
    offload = Offload(lambda: views, lambda: [dropped])
    offload.offload()
    offload.offload()  # the second call has no effect
    assert [v.untyped_storage().nbytes() for v in (base, *views, dropped)] == [0] * 6
    offload.reload()
    offload.reload()
    assert all(torch.equal(v, b) for v, b in zip(views, before, strict=True))
    assert torch.equal(base[10:20], before[0])
    base[10] = 7.0
    assert float(views[0][0]) == 7.0
    assert dropped.untyped_storage().nbytes() == 256


def test_new_tensors_are_offloaded():
    tensors = [torch.ones(3)]
    offload = Offload(lambda: tensors)
    offload.offload()
    offload.reload()
    tensors.append(torch.full((4,), 2.0))
    offload.offload()
    assert tensors[1].untyped_storage().nbytes() == 0
    offload.reload()
    assert tensors[1].tolist() == [2.0] * 4
