"""Paged attention of one decoding step, and the small ops around it, against float64 row by row."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from decode_cases import CASES, EPS, TOLERANCE, check, make
from threads import with_threads

from megatron_brorl.ops.fused.decode import FusedDecode
from megatron_brorl.ops.reference import decode as reference
from megatron_brorl.ops.reference.decode import DecodeOps

IMPLEMENTATIONS = [FusedDecode(), DecodeOps()]


@pytest.mark.parametrize("ops", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_attention_agrees_with_float64(number, with_norms, dtype, ops):
    case = make(number, dtype, with_norms)
    check(case, case.run(ops))


def test_the_same_bits_for_any_number_of_threads():
    first, *others = with_threads(lambda: make(2, torch.float32).run(FusedDecode()))
    assert all(torch.equal(first, x) for x in others)


def test_the_reference_gathers_a_few_rows_at_a_time(monkeypatch):
    case = make(2, torch.float32)
    monkeypatch.setattr(reference, "GATHERED", 1)  # one row
    check(case, case.run(DecodeOps()))


@pytest.mark.parametrize("ops", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [1, 40, 256])
def test_add_norm_and_silu_mul(width, dtype, ops):
    g = torch.Generator().manual_seed(width)
    x, delta = (100 * torch.randn(5, width, generator=g).to(dtype) for _ in range(2))
    weight = torch.randn(width, generator=g).to(dtype)
    total = (x.double() + delta.double()).to(dtype)
    result = ops.add_norm(x, delta, weight, EPS)
    assert torch.equal(x, total)
    expected = total.double() / (total.double().square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    assert torch.allclose(result.double(), expected, rtol=TOLERANCE[dtype], atol=1e-6)
    without_delta = ops.add_norm(x, None, weight, EPS)  # x is the sum by now
    assert torch.equal(without_delta, result)
    gate_up = torch.cat((50 * x[:, :1].sign() * x.abs() / x.abs().max(), delta), dim=1)  # gates of up to +-50
    gate, up = gate_up.double().chunk(2, dim=1)
    expected = gate / (1 + (-gate).exp()) * up
    assert torch.allclose(ops.silu_mul(gate_up).double(), expected, rtol=2 * TOLERANCE[dtype], atol=1e-5)


MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"tables": torch.full((5, 13), 99, dtype=torch.int32)}, IndexError, r"tables\[0, 0\] is 99 of "),
    ({"lengths": torch.tensor([1, 2, 3, 4, 0])}, ValueError, r"lengths\[4\] is 0"),
    ({"lengths": torch.tensor([1, 2, 3, 4, 999])}, ValueError, "tables of row 4 has no room for 999 tokens"),
    ({"prompts": torch.tensor([0, 0, 0, 0, 1])}, IndexError, r"prompts\[4\] is 1 of 1"),
    ({"prompts": torch.zeros(4, dtype=torch.int64)}, ValueError, r"prompts must be \[5\], got \[4\]"),
    ({"cos": torch.zeros(5, 31)}, ValueError, r"cos must be \[5, 32\], got \[5, 31\]"),
    ({"tables": torch.zeros(5, 13, dtype=torch.int64)}, TypeError, "tables must be Int, got Long"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), MISTAKES)
def test_mistakes_raise_one_clear_error(wrong, error, message):
    case = make(0, torch.float32)
    case.rows = dataclasses.replace(case.rows, **wrong)
    with pytest.raises(error, match=message):
        case.run(FusedDecode())
