"""The fused value loss against a loop over Python floats: values, gradients, moments, masks and errors."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from ops.value_cases import CASES, Case, assert_agree, make

from megatron_brorl.algo.advantages import explained_variance, merge
from megatron_brorl.ops.fused.backend import value_loss
from megatron_brorl.ops.reference import advantages as reference

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-12}


@pytest.mark.parametrize("op", [value_loss, reference.value_loss])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_a_loop_over_floats(name, dtype, op):
    result = CASES[name].call(op, dtype, upstream=-2.5)
    assert result[0].loss.dtype == result[1].dtype == dtype
    assert_agree(result, CASES[name], upstream=-2.5, tolerance=TOLERANCE[dtype])


def test_gradient_at_the_clip_bound_and_at_ties():
    # The gradient is v - R: at the clip bound (0.5), inside of it (0.25), and for the third value, 2, because 2 and its
    # clipped value, 0, are equally far from the return, 1.
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
def test_an_unmasked_nan_makes_the_loss_nan(broken):
    case = make(50, masked=0.0)
    tensor = getattr(case, broken).clone()
    tensor[17] = float("nan")
    case = dataclasses.replace(case, **{broken: tensor})
    assert math.isnan(case.call(value_loss, torch.float32)[0].sums["loss"])
    assert math.isnan(case.call(reference.value_loss, torch.float32)[0].sums["loss"])
    if broken == "old_values":  # An unclipped loss does not read old_values.
        assert math.isfinite(dataclasses.replace(case, clip=math.inf).call(value_loss, torch.float32)[0].sums["loss"])


def test_a_second_derivative_is_refused():
    case = make(30, masked=0.0)
    values = case.values.clone().requires_grad_()
    loss = value_loss(values, case.old_values, case.returns, case.weights, case.clip).loss
    (first,) = torch.autograd.grad(loss.square(), values, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_explained_variance_merges_over_parts(parts):
    case = make(9000, masked=0.0, offset=50.0)
    fields = (case.values, case.old_values, case.returns, case.weights)
    split_fields = zip(*(field.split(9000 // parts) for field in fields), strict=True)
    losses = [value_loss(*part, case.clip) for part in split_fields]
    merged = explained_variance(merge([x.returns for x in losses]), merge([x.residuals for x in losses]))
    residuals = case.returns - case.values
    assert merged == pytest.approx(1 - residuals.var().item() / case.returns.var().item(), rel=1e-12)


X = torch.zeros(5)  # The inputs below are values, old values, returns, weights and clip.


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ((X, torch.zeros(6), X, X, 0.2), ValueError, r"old_values must be \[5\], got \[6\]"),
        ((X.bfloat16(), X, X, X, 0.2), TypeError, "values must be float32 or float64"),
        ((X, X, X, X.to("meta"), 0.2), ValueError, "all must be on one device"),
        ((X, X, X, X, float("nan")), ValueError, "clip must be at least 0"),
    ],
)
def test_other_shapes_and_dtypes_are_refused(inputs, error, message):
    with pytest.raises(error, match=message):
        value_loss(*inputs)
