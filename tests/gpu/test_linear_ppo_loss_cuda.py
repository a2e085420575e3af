"""The fused loss on a GPU: the cases and the float64 reference of tests/ops."""

from __future__ import annotations

import pytest
import torch
from kernel_device import DEVICE, EMULATED, MARKS
from ops.linear_cases import EVERYTHING, SETTINGS, SHAPES, TOLERANCE, VARIANTS, assert_agree, make

from megatron_brorl.ops.fused import linear as fused
from megatron_brorl.ops.reference import linear as reference

pytestmark = MARKS
# More rows than a chunk of logits. The emulation has smaller chunks, because it takes a second for 100 rows.
HERE = [x for x in SHAPES if x[0] <= 130] if EMULATED else [*SHAPES, (5000, 64, 9001)]
SOME, MORE = (70, 130) if EMULATED else (240, 700)


@pytest.mark.parametrize("settings", [SETTINGS, EVERYTHING])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("rows", "width", "vocab"), HERE)
def test_agrees_with_float64(rows, width, vocab, dtype, settings):
    case = make(rows, width, vocab, torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    got = case.call(fused.linear_ppo_loss, dtype, settings, device=DEVICE)
    assert_agree(got, case.call(reference.linear_ppo_loss, settings=settings), TOLERANCE[dtype])


@pytest.mark.parametrize("settings", VARIANTS)
def test_every_term_agrees(settings):
    case = make(SOME, 20, 333)
    got = case.call(fused.linear_ppo_loss, torch.float32, settings, device=DEVICE)
    assert_agree(got, case.call(reference.linear_ppo_loss, settings=settings), 1e-5)


def test_results_are_reproducible_bit_for_bit():
    runs = [make(MORE, 31, 999).call(fused.linear_ppo_loss, torch.float32, EVERYTHING, device=DEVICE) for _ in range(3)]
    for result, *grads in runs[1:]:
        assert result.sums == runs[0][0].sums
        assert all(torch.equal(a, b) for a, b in zip(grads, runs[0][1:], strict=True))
