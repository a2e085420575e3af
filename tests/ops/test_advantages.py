"""GAE, group advantages, moments and whitening against loops over Python floats and closed forms."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ops.advantage_cases import (
    GAE_CASES,
    GROUP_CASES,
    MOMENT_CASES,
    assert_moments,
    gae_by_hand,
    gae_case,
    groups_by_hand,
    hole,
    moments_by_hand,
    sample,
)
from torch import Tensor

from megatron_brorl.algo.advantage import Moments, merge, whiten
from megatron_brorl.ops.fused import advantages as fused
from megatron_brorl.ops.reference import advantages as reference

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
LAYERS = [fused, reference]


def for_threads(call: Callable[[], Any]) -> list[Any]:
    """The results for several thread counts, some of them twice."""
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 1, 2, 3):
            torch.set_num_threads(threads)
            found.append(call())
    finally:
        torch.set_num_threads(before)
    return found


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", GAE_CASES)
def test_gae_agrees_with_the_sum_it_stands_for(name, dtype, layer):
    case = GAE_CASES[name]
    for got, expected in zip(layer.gae(*case.inputs(dtype)), gae_by_hand(case), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), expected, rtol=TOLERANCE[dtype], atol=10 * TOLERANCE[dtype])
        if case.mask is not None:
            assert torch.count_nonzero(got[~case.mask]) == 0


def test_gae_without_discount_is_the_reward_to_go():
    case = gae_case([40, 0, 7], 0, False, 1.0, 1.0)
    advantages, returns = fused.gae(*case.inputs(torch.float64))
    to_go = torch.cat([x.flip(0).cumsum(0).flip(0) for x in case.rewards.split([40, 0, 7])])
    torch.testing.assert_close(returns, to_go, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(advantages, to_go - case.values, rtol=1e-12, atol=1e-12)


def test_gae_with_lambda_zero_is_the_td_error():
    case = gae_case([40, 7], 0, True, 0.9, 0.0)
    after = torch.cat((case.values[1:], case.values[:1]))
    after[[39, 46]] = case.bootstrap
    advantages, _ = fused.gae(*case.inputs(torch.float64))
    torch.testing.assert_close(advantages, case.rewards + 0.9 * after - case.values, rtol=1e-12, atol=1e-12)


def test_segments_do_not_leak():
    case = gae_case([5, 300, 70], 0, True, 1.0, 1.0)
    before = fused.gae(*case.inputs(torch.float64))
    case.rewards[5:305], case.bootstrap[1] = float("nan"), float("inf")
    for a, b in zip(before, fused.gae(*case.inputs(torch.float64)), strict=True):
        assert torch.equal(a[:5], b[:5])
        assert torch.equal(a[305:], b[305:])
        assert not torch.isfinite(b[5:305]).any()


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("kind", ["mean", "mean_std"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", GROUP_CASES)
def test_group_advantages_agree_with_a_loop(name, dtype, kind, layer):
    case = GROUP_CASES[name]
    got = layer.group_advantages(*case.inputs(dtype), kind)
    expected = groups_by_hand(case, kind)
    torch.testing.assert_close(got.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(got == 0, expected == 0)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("kind", ["mean", "mean_std"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("value", [0.0, 1.0, 0.95, -1e6 / 3])
def test_equal_rewards_give_exactly_zero(value, dtype, kind, layer):
    rewards = torch.full((700,), value, dtype=dtype)
    got = layer.group_advantages(rewards, torch.tensor([0, 1, 188, 700]), None, kind)
    assert torch.count_nonzero(got) == 0


@pytest.mark.parametrize("name", MOMENT_CASES)
def test_moments_agree_with_exact_sums(name):
    values, weights = MOMENT_CASES[name]
    assert_moments(fused.to_moments(fused.moments(values, weights)), values, weights)


def test_float32_values_keep_a_small_spread_far_from_zero():
    values = sample(200_000, 1e6).float()
    got = fused.to_moments(fused.moments(values))
    exact = values.double()
    assert got.mean == pytest.approx(exact.mean().item(), rel=1e-15)
    assert got.std == pytest.approx(exact.std(correction=0).item(), rel=1e-11)


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("weighted", [True, False])
def test_moments_of_parts_merge(parts, weighted):
    values, weights = sample(20_000, 100.0), sample(20_000, seed=2).abs() if weighted else None
    shards = values.split(20_000 // parts)
    of_shards = [None] * parts if weights is None else weights.split(20_000 // parts)
    found = [fused.to_moments(fused.moments(v, w)) for v, w in zip(shards, of_shards, strict=True)]
    got = merge(found)
    count, mean, m2 = moments_by_hand(values, weights)
    assert (got.count, got.mean, got.m2) == pytest.approx((count, mean, m2), rel=1e-12)


def test_a_nan_that_counts_is_seen():
    values = sample(5000)
    values[4321] = float("nan")
    assert math.isnan(fused.to_moments(fused.moments(values)).mean)
    assert math.isnan(fused.to_moments(fused.moments(values, torch.ones(5000).double())).m2)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(5,), (0,), (), (70, 300)])
@pytest.mark.parametrize("masked", [True, False])
def test_whiten_agrees_with_the_reference(dtype, shape, masked):
    n = math.prod(shape)
    values = (1e3 + 2 * sample(n)).view(shape).to(dtype)
    mask = hole(n).view(shape) if masked else None
    if mask is not None:
        values[~mask] = float("nan")
    expected = whiten(values, Moments(10.0, 1e3, 40.0))
    if mask is not None:
        expected = torch.where(mask, expected, 0.0)
    memory = values.data_ptr()
    got = fused.whiten_(values, 1e3, 2.0, mask)
    assert got is values
    assert got.data_ptr() == memory
    torch.testing.assert_close(got, expected, rtol=TOLERANCE[dtype], atol=0)


@pytest.mark.parametrize("masked", [True, False])
def test_whiten_without_spread_gives_zeros(masked):
    values = torch.full((5000,), 3.0)
    values[7], values[8] = float("nan"), float("inf")
    got = fused.whiten_(values, 2.0, 0.0, hole(5000) if masked else None)
    assert torch.equal(got.signbit(), torch.zeros(5000, dtype=torch.bool))  # no -0 either
    assert torch.count_nonzero(got) == 0


def test_whitened_values_have_mean_zero_and_std_one():
    values = sample(50_000, 1e4, 3.0).float()
    found = fused.to_moments(fused.moments(values))
    got = fused.whiten_(values, found.mean, found.std).double()
    assert got.mean().abs() < 1e-4  # float32 holds 1e4 to 5e-4
    assert got.std(correction=0).item() == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_bitwise_the_same_for_any_number_of_threads(dtype):
    values, mask = sample(300_000, 5.0).to(dtype), hole(300_000)
    weights = sample(300_000, seed=7).abs().to(dtype)
    starts = torch.arange(0, 300_001, 100)
    calls: list[Callable[[], Tensor]] = [
        lambda: fused.moments(values),
        lambda: fused.moments(values, mask),
        lambda: fused.moments(values, weights),
        lambda: fused.whiten_(values.clone(), 5.0, 1.3),
        lambda: fused.whiten_(values.clone(), 5.0, 1.3, mask),
        lambda: torch.stack(fused.gae(values, weights, starts, mask, None, 0.99, 0.9)),
        lambda: torch.stack(fused.gae(values, weights, starts, None, None, 0.99, 0.9)),
        lambda: fused.group_advantages(values, starts, mask, "mean_std"),
    ]
    for call in calls:
        first, *others = for_threads(call)
        assert all(torch.equal(first, x) for x in others)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ["plain", "masked", "no segments"])
def test_opcheck_gae(dtype, name):
    inputs = GAE_CASES[name].inputs(dtype)
    out = torch.empty_like(inputs[0]), torch.empty_like(inputs[0])
    torch.library.opcheck(torch.ops.brorl.gae_.default, (*inputs, *out))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ["plain", "all lost", "no groups"])
@pytest.mark.parametrize("by_std", [True, False])
def test_opcheck_group_advantages(dtype, name, by_std):
    torch.library.opcheck(torch.ops.brorl.group_advantages.default, (*GROUP_CASES[name].inputs(dtype), by_std))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("weights", ["none", "bool", "own"])
@pytest.mark.parametrize("n", [0, 3000])
def test_opcheck_moments_and_whiten(dtype, weights, n):
    values = sample(n).to(dtype)
    chosen = {"none": None, "bool": hole(n), "own": values.abs()}[weights]
    torch.library.opcheck(torch.ops.brorl.moments.default, (values, chosen))
    mask = None if weights == "none" else hole(n)
    torch.library.opcheck(torch.ops.brorl.whiten_.default, (values, 1.5, 2.0, mask))


def test_nothing_is_recorded():
    x = torch.randn(10, requires_grad=True)
    starts = torch.tensor([0, 10])
    assert not any(y.requires_grad for y in fused.gae(x, x, starts))
    assert not fused.group_advantages(x, starts).requires_grad
    assert not fused.moments(x).requires_grad


def test_strided_inputs():
    case = GAE_CASES["masked"]
    spread = {f: getattr(case, f) for f in ("rewards", "values", "mask", "bootstrap")}
    spread = {f: torch.stack((x, x), dim=1)[:, 0] for f, x in spread.items()}
    got = fused.gae(*dataclasses.replace(case, **spread).inputs(torch.float64))
    assert all(torch.equal(a, b) for a, b in zip(got, fused.gae(*case.inputs(torch.float64)), strict=True))
    square = sample(900).view(30, 30)
    got = fused.to_moments(fused.moments(square.t()))
    assert got.mean == pytest.approx(square.mean().item(), rel=1e-12)


def gae_of_equal_segments(rewards, values, length, mask, gamma, lam):
    """Segments of one length side by side, a column at a time in float64: the recursion of reference.gae without its
    loop over tokens, which takes a minute for millions."""
    r, v = rewards.double().view(-1, length), values.double().view(-1, length)
    kept = torch.ones_like(r, dtype=torch.bool) if mask is None else mask.view(-1, length)
    advantages, returns = torch.zeros_like(r), torch.zeros_like(r)
    advantage, next_value = torch.zeros(len(r)).double(), torch.zeros(len(r)).double()
    for t in reversed(range(length)):
        own = r[:, t] + gamma * next_value - v[:, t] + gamma * lam * advantage
        advantage = torch.where(kept[:, t], own, advantage)
        next_value = torch.where(kept[:, t], v[:, t], next_value)
        advantages[:, t] = torch.where(kept[:, t], own, 0.0)
        returns[:, t] = torch.where(kept[:, t], own + v[:, t], 0.0)
    return advantages.flatten(), returns.flatten()


@pytest.mark.parametrize("masked", [False, True])
def test_segments_side_by_side_are_the_reference_s(masked):
    rewards, values, mask = sample(1_000), sample(1_000, seed=1), hole(1_000) if masked else None
    expected = reference.gae(rewards, values, torch.arange(0, 1_001, 100), mask, None, 0.99, 0.9)
    for a, b in zip(gae_of_equal_segments(rewards, values, 100, mask, 0.99, 0.9), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("size", [1_000, 3_000_000])  # the larger is written past the caches
def test_gae_into_given_memory(masked, size):
    rewards, values = sample(size).float(), sample(size, seed=1).float()
    starts, mask = torch.arange(0, size + 1, 100), hole(size) if masked else None
    expected = gae_of_equal_segments(rewards, values, 100, mask, 0.99, 0.9)
    first, second = torch.empty(size + 1)[1:], torch.empty(size)  # one of them not aligned
    got = fused.gae(rewards, values, starts, mask, None, 0.99, 0.9, out=(first, second))
    assert got[0] is first
    assert got[1] is second
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a.double(), b, rtol=1e-5, atol=1e-5)
    in_place = fused.gae(rewards, values, starts, mask, None, 0.99, 0.9, out=(rewards, values))
    assert all(torch.equal(a, b) for a, b in zip(in_place, got, strict=True))


LONG = torch.int64
BFLOAT = torch.bfloat16
BOTH = torch.zeros(5)
GAE_MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"rewards": torch.zeros(5, 1)}, ValueError, r"rewards must be \[T\], got \[5, 1\]"),
    ({"rewards": torch.zeros(5, dtype=BFLOAT)}, TypeError, r"rewards must be float32 or float64 \(widen it first\)"),
    ({"values": torch.zeros(6)}, ValueError, r"values must be \[5\], got \[6\]"),
    ({"values": torch.zeros(5).double()}, TypeError, "values must be Float, got Double"),
    ({"starts": torch.tensor([0, 5], dtype=torch.int32)}, TypeError, "starts must be Long, got Int"),
    ({"starts": torch.zeros(0, dtype=LONG)}, ValueError, r"starts must be \[S \+ 1\]"),
    ({"starts": torch.tensor([[0, 5]])}, ValueError, r"starts must be \[S \+ 1\]"),
    ({"starts": torch.tensor([1, 5])}, ValueError, "starts must go from 0 to the 5 tokens, goes from 1 to 5"),
    ({"starts": torch.tensor([0, 4])}, ValueError, "starts must go from 0 to the 5 tokens, goes from 0 to 4"),
    ({"starts": torch.tensor([0, 4, 3, 5])}, ValueError, r"starts must not fall: starts\[1\] is 4, starts\[2\] is 3"),
    ({"starts": torch.tensor([0, 900, 5])}, ValueError, "starts must not fall"),
    ({"mask": torch.ones(4, dtype=torch.bool)}, ValueError, r"mask must be \[5\], got \[4\]"),
    ({"mask": torch.ones(5)}, TypeError, "mask must be Bool, got Float"),
    ({"bootstrap": torch.ones(2)}, ValueError, r"bootstrap must be \[1\], got \[2\]"),
    ({"bootstrap": torch.ones(1, device="meta")}, ValueError, "tensors are on cpu, meta"),
    ({"out": (torch.zeros(5), torch.zeros(4))}, ValueError, r"what gae_ writes must be \[5\], got \[4\]"),
    ({"out": (torch.zeros(5).double(), torch.zeros(5))}, TypeError, "what gae_ writes must be Float, got Double"),
    ({"out": (torch.zeros(10)[::2], torch.zeros(5))}, ValueError, "what gae_ writes must be contiguous"),
    ({"out": (BOTH, BOTH)}, ValueError, "advantages and returns must be two tensors"),
    ({"out": (BOTH, torch.zeros(5, requires_grad=True))}, ValueError, "out requires a gradient"),
    ({"gamma": 1.01}, ValueError, r"gamma must be in \[0, 1\]"),
    ({"lam": float("nan")}, ValueError, r"lam must be in \[0, 1\]"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), GAE_MISTAKES)
def test_mistakes_in_gae_raise_one_clear_error(wrong, error, message):
    good = {"rewards": torch.zeros(5), "values": torch.zeros(5), "starts": torch.tensor([0, 5])}
    with pytest.raises(error, match=message):
        fused.gae(**(good | wrong))


OTHER_MISTAKES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: fused.group_advantages(torch.zeros(5), torch.tensor([0, 6])), ValueError, "from 0 to the 5 rewards"),
    (lambda: fused.group_advantages(torch.zeros(5).half(), torch.tensor([0, 5])), TypeError, "rewards must be float32"),
    (lambda: fused.group_advantages(torch.zeros(5), torch.tensor([0, 5]), kind="median"), ValueError, "kind is 'med"),
    (lambda: fused.moments(torch.zeros(5, dtype=BFLOAT)), TypeError, "values must be float32 or float64"),
    (lambda: fused.moments(torch.zeros(5), torch.zeros(5, 1)), ValueError, r"weights must be \[5\], got \[5, 1\]"),
    (lambda: fused.moments(torch.zeros(5), torch.zeros(5).double()), TypeError, "weights must be Float, got Double"),
    (lambda: fused.moments(torch.zeros(5, device="meta")), ValueError, "tensors are on meta"),
    (lambda: fused.to_moments(torch.zeros(4)), ValueError, r"takes the \[3\] tensor"),
    (lambda: fused.whiten_(torch.zeros(5), 0.0, -1.0), ValueError, "std must be at least 0"),
    (lambda: fused.whiten_(torch.zeros(5).int(), 0.0, 1.0), TypeError, "values must be float32 or float64"),
    (lambda: fused.whiten_(torch.zeros(4, 5).t(), 0.0, 1.0), ValueError, "values must be contiguous"),
    (lambda: fused.whiten_(torch.zeros(5), 0.0, 1.0, torch.ones(4).bool()), ValueError, r"mask must be \[5\]"),
    (lambda: fused.whiten_(torch.zeros(5, requires_grad=True), 0.0, 1.0), ValueError, "values require a gradient"),
]


@pytest.mark.parametrize(("call", "error", "message"), OTHER_MISTAKES)
def test_other_mistakes_raise_one_clear_error(call, error, message):
    with pytest.raises(error, match=message):
        call()
