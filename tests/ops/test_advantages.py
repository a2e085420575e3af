"""GAE, moments and whitening against loops over Python floats and closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from ops.advantage_cases import GAE_CASES, MOMENT_CASES, TOLERANCE, check_gae, check_moments, sample
from threads import with_threads

from megatron_brorl.algo import advantages as algo
from megatron_brorl.algo.advantages import Moments
from megatron_brorl.ops.fused import backend as fused
from megatron_brorl.ops.reference import advantages as reference

IMPLEMENTATIONS = [fused, reference]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", GAE_CASES)
def test_gae_equals_the_sum_of_discounted_errors(name, dtype, implementation):
    check_gae(implementation.gae, name, dtype)


def test_gae_segments_are_independent():
    rewards = sample(375)
    values = sample(375, seed=1)
    starts = torch.tensor([0, 5, 305, 375])
    before = fused.gae(rewards, values, starts)
    rewards[5:305] = float("nan")
    for a, b in zip(before, fused.gae(rewards, values, starts), strict=True):
        assert torch.equal(a[:5], b[:5])
        assert torch.equal(a[305:], b[305:])
        assert b[5:305].isnan().all()


@pytest.mark.parametrize("op", [fused.moments, algo.moments])
@pytest.mark.parametrize("name", MOMENT_CASES)
def test_moments_equal_exact_sums(name, op):
    check_moments(op, name)


def test_moments_propagate_nan():
    values = sample(5000)
    values[4321] = float("nan")
    assert math.isnan(fused.moments(values).mean)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(5,), (0,), (), (70, 300)])
def test_whiten_equals_the_reference(dtype, shape):
    values = (1e3 + 2 * sample(math.prod(shape))).view(shape).to(dtype)
    batch = Moments(count=10.0, mean=1e3, m2=40.0)
    expected = algo.whiten(values, batch)
    torch.testing.assert_close(fused.whiten(values, batch), expected, rtol=TOLERANCE[dtype], atol=0)


def test_whiten_without_spread_gives_zeros():
    values = torch.tensor([3.0, float("nan"), float("inf"), -1.0])
    whitened = fused.whiten(values, Moments(count=10.0, mean=2.0, m2=0.0))
    assert torch.equal(whitened.signbit(), torch.zeros(4, dtype=torch.bool))  # The sign bit distinguishes 0 from -0.
    assert torch.count_nonzero(whitened) == 0


def test_results_do_not_depend_on_the_number_of_threads():
    values = sample(300_000, mean=5.0)
    other = sample(300_000, seed=7)
    starts = torch.arange(0, 300_001, 100)

    def results():
        return fused.moments(values), [x.tolist() for x in fused.gae(values, other, starts, gamma=0.99, lam=0.9)]

    one, two, three = with_threads(results)
    assert one == two == three


def test_results_have_no_gradient():
    x = torch.randn(10, requires_grad=True)
    starts = torch.tensor([0, 10])
    assert not any(y.requires_grad for y in fused.gae(x, x, starts))
    with pytest.raises(ValueError, match="values require a gradient"):
        fused.whiten(x, Moments(count=10.0, mean=0.0, m2=1.0))


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        (torch.zeros(0, dtype=torch.int64), r"starts must be \[S \+ 1\]"),
        (torch.tensor([1, 5]), "starts must go from 0 to the 5 tokens, goes from 1 to 5"),
        (torch.tensor([0, 4]), "starts must go from 0 to the 5 tokens, goes from 0 to 4"),
        (torch.tensor([0, 4, 3, 5]), r"starts must not fall: starts\[1\] is 4, starts\[2\] is 3"),
        (torch.tensor([0, 900, 5]), "starts must not fall"),
        (torch.tensor([0, 5], device="meta"), "tensors are on cpu, meta"),
    ],
)
def test_starts_outside_of_memory_are_refused(starts, message):
    with pytest.raises(ValueError, match=message):
        fused.gae(torch.zeros(5), torch.zeros(5), starts)


FIVE = torch.zeros(5)


@pytest.mark.parametrize(
    ("rewards", "values", "lam", "error", "message"),
    [
        (FIVE, torch.zeros(6), 1.0, ValueError, r"values must be \[5\], got \[6\]"),
        (FIVE, FIVE.double(), 1.0, TypeError, "values must be Float, got Double"),
        (FIVE.bfloat16(), FIVE.bfloat16(), 1.0, TypeError, "rewards must be float32 or float64"),
        (FIVE, FIVE, float("nan"), ValueError, r"lam must be in \[0, 1\]"),
    ],
)
def test_other_shapes_and_dtypes_are_refused(rewards, values, lam, error, message):
    with pytest.raises(error, match=message):
        fused.gae(rewards, values, torch.tensor([0, 5]), gamma=1.0, lam=lam)
