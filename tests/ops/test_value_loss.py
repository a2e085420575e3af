"""The fused value loss against a loop over Python floats: values, gradients, moments, masks, registration, mistakes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from ops.value_cases import CASES, Case, assert_agree, by_hand, make

from megatron_brorl.algo.advantage import explained_variance, merge
from megatron_brorl.ops.fused.value import value_loss
from megatron_brorl.ops.reference import value as reference

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-12}


@pytest.mark.parametrize("op", [value_loss, reference.value_loss])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_a_loop_over_floats(name, dtype, op):
    got = CASES[name].call(op, dtype, upstream=-2.5)
    assert got[0].loss.dtype == got[1].dtype == dtype
    assert_agree(got, CASES[name], -2.5, TOLERANCE[dtype])


def test_the_cases_clip_and_mask():
    expected = by_hand(CASES["many"])
    assert 500 < expected.clipped < 2500
    assert 3000 < expected.tokens < 4000
    assert by_hand(CASES["unclipped"]).clipped == 0


def test_gradcheck():
    case = make(200, masked=0.2)
    kept = case.weights != 0
    bound = (case.values - case.old_values).abs() - case.clip
    held = case.values.clamp(case.old_values - case.clip, case.old_values + case.clip)
    tie = (held - case.returns).abs() - (case.values - case.returns).abs()
    # Away from the kinks of clamp and maximum, where finite differences see another branch.
    kept &= (bound.abs() > 1e-3) & ((bound < 0) | (tie.abs() > 1e-3))
    case = dataclasses.replace(case, weights=torch.where(kept, case.weights, 0.0))
    inputs = (case.values.nan_to_num().requires_grad_(), case.old_values, case.returns, case.weights, case.clip)
    assert 50 < int(kept.sum()) < 200
    assert torch.autograd.gradcheck(lambda *x: torch.ops.brorl.value_loss(*x)[0], inputs)


def test_the_bound_itself_and_ties():
    # At the bound and inside, the gradient is v - R; 2 and its clipped value 0 lie equally far from a return of 1.
    case = Case(
        values=torch.tensor([0.5, 0.25, 2.0], dtype=torch.float64),
        old_values=torch.tensor([0.0, 0.0, -0.5], dtype=torch.float64),
        returns=torch.tensor([3.0, 3.0, 1.0], dtype=torch.float64),
        weights=torch.ones(3, dtype=torch.float64),
        clip=0.5,
    )
    result, gradient = case.call(value_loss, torch.float64)
    assert gradient.tolist() == [-2.5, -2.75, 1.0]
    assert result.sums["clipped"] == 0


@pytest.mark.parametrize("broken", ["values", "old_values", "returns", "weights"])
def test_a_nan_that_counts_is_seen(broken):
    case = make(50, masked=0.0)
    x = getattr(case, broken).clone()
    x[17] = float("nan")
    case = dataclasses.replace(case, **{broken: x})
    assert math.isnan(case.call(value_loss, torch.float32)[0].sums["loss"])
    assert math.isnan(case.call(reference.value_loss, torch.float32)[0].sums["loss"])
    if broken == "old_values":  # which an unclipped loss does not look at
        assert math.isfinite(dataclasses.replace(case, clip=math.inf).call(value_loss, torch.float32)[0].sums["loss"])


def test_backward_twice_adds_the_same_gradient():
    case = make(300, masked=0.0)
    values = case.values.clone().requires_grad_()
    loss = value_loss(values, case.old_values, case.returns, case.weights, case.clip).loss
    loss.backward(retain_graph=True)
    once = values.grad.clone()
    loss.backward()
    assert torch.equal(values.grad, 2 * once)


def test_a_second_derivative_is_refused():
    case = make(30, masked=0.0)
    values = case.values.clone().requires_grad_()
    loss = value_loss(values, case.old_values, case.returns, case.weights, case.clip).loss
    (first,) = torch.autograd.grad(loss.square(), values, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()


def test_only_values_have_a_gradient():
    x = torch.ones(5, requires_grad=True)
    with pytest.raises(RuntimeError, match="only values have a gradient"):
        value_loss(x, torch.ones(5), x * 2, torch.ones(5), 0.2).loss.backward()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_bitwise_repeatable_for_any_number_of_threads(dtype):
    before = torch.get_num_threads()
    runs = []
    try:
        for threads in (1, 2, 1, 2, 3):
            torch.set_num_threads(threads)
            runs.append(CASES["many blocks"].call(value_loss, dtype))
    finally:
        torch.set_num_threads(before)
    for result, gradient in runs[1:]:
        assert torch.equal(result.loss, runs[0][0].loss)
        assert (result.sums, result.returns, result.residuals) == (
            runs[0][0].sums,
            runs[0][0].returns,
            runs[0][0].residuals,
        )
        assert torch.equal(gradient, runs[0][1])


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_explained_variance_merges_over_parts(parts):
    case = make(9000, masked=0.0, offset=50.0)
    fields = (case.values, case.old_values, case.returns, case.weights)
    found = [value_loss(*x, case.clip) for x in zip(*(f.split(9000 // parts) for f in fields), strict=True)]
    got = explained_variance(merge([f.returns for f in found]), merge([f.residuals for f in found]))
    residuals = case.returns - case.values
    assert got == pytest.approx(1 - residuals.var().item() / case.returns.var().item(), rel=1e-12)


def test_explained_variance_of_returns_that_do_not_vary():
    ones = torch.ones(4)
    result = value_loss(torch.zeros(4), ones, ones, ones, 0.2)
    assert math.isnan(explained_variance(result.returns, result.residuals))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("clip", [0.2, math.inf])
@pytest.mark.parametrize("rows", [0, 5, 3000])
@pytest.mark.parametrize("recording", [True, False])
def test_opcheck(dtype, clip, rows, recording):
    case = make(rows, masked=0.0)
    values = case.values.to(dtype).requires_grad_(recording)
    rest = (x.to(dtype) for x in (case.old_values, case.returns, case.weights))
    torch.library.opcheck(torch.ops.brorl.value_loss.default, (values, *rest, clip))


def test_strided_inputs():
    case = make(64, masked=0.0)
    fields = (case.values, case.old_values, case.returns, case.weights)
    spread = [torch.stack((x, x * float("nan")), dim=1)[:, 0] for x in fields]
    assert not spread[0].is_contiguous()
    assert value_loss(*spread, case.clip).sums == value_loss(*fields, case.clip).sums


MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"values": torch.zeros(5, 1)}, ValueError, r"values must be \[R\], got \[5, 1\]"),
    ({"values": torch.zeros(5, dtype=torch.bfloat16)}, TypeError, "values must be float32 or float64"),
    ({"values": torch.zeros(5, dtype=torch.int64)}, TypeError, "values must be float32 or float64"),
    ({"old_values": torch.zeros(6)}, ValueError, r"old_values must be \[5\], got \[6\]"),
    ({"returns": torch.zeros(5, dtype=torch.float64)}, TypeError, "returns must be Float, got Double"),
    ({"weights": torch.ones(5, dtype=torch.bool)}, TypeError, "weights must be Float, got Bool"),
    ({"weights": torch.zeros(5, device="meta")}, ValueError, "tensors are on cpu, meta; all must be on one device"),
    ({"clip": -0.1}, ValueError, "clip must be at least 0"),
    ({"clip": float("nan")}, ValueError, "clip must be at least 0"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), MISTAKES)
def test_mistakes_raise_one_clear_error(wrong, error, message):
    good = {name: torch.zeros(5) for name in ("values", "old_values", "returns", "weights")}
    with pytest.raises(error, match=message):
        value_loss(**(good | {"clip": 0.2} | wrong))
