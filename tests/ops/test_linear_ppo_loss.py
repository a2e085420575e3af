"""The fused loss against the same formula in float64: values, gradients, extremes, registration, mistakes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_brorl.algo import loss as algo_loss
from megatron_brorl.ops import fused, reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-12}
SETTINGS: dict[str, float] = {"eps_low": 0.2, "eps_high": 0.28, "is_cap": 2.0, "temperature": 0.7}


@dataclasses.dataclass(frozen=True)
class Case:
    """Inputs of one call in float64, representable in `dtype`; old log-probs lie around the true ones."""

    hidden: Tensor  # [R, H]
    weight: Tensor  # [V, H]
    ids: Tensor  # [R]
    old: Tensor | None  # [R]
    rollout: Tensor  # [R]
    advantages: Tensor  # [R]
    divisor: float

    def call(self, op: Any, dtype: torch.dtype = torch.float64, upstream: float = 1.0, **settings: float) -> Any:
        """(result of op, gradient of hidden, gradient of weight)."""
        vector = reference.compute_dtype(dtype)
        hidden, weight = (x.to(dtype, copy=True).requires_grad_() for x in (self.hidden, self.weight))
        old = None if self.old is None else self.old.to(vector)
        result = op(
            hidden,
            weight,
            self.ids,
            old,
            self.rollout.to(vector),
            self.advantages.to(vector),
            self.divisor,
            **(SETTINGS | settings),
        )
        (upstream * result.loss).backward()
        return result, hidden.grad, weight.grad


def make(rows: int, width: int, vocab: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0):
    g = torch.Generator().manual_seed(1000 * seed + rows + width + vocab)
    hidden = (scale * torch.randn(rows, width, generator=g)).to(dtype).double()
    weight = (torch.randn(vocab, width, generator=g) / width**0.5).to(dtype).double()
    ids = torch.randint(0, vocab, (rows,), generator=g)
    true, _ = reference.linear_log_probs(hidden, weight, ids, SETTINGS["temperature"])
    shift = 0.5 * torch.randn(2, rows, generator=g)
    old = (true + shift[0]).float().double()
    advantages = torch.randn(rows, generator=g).double()
    return Case(hidden, weight, ids, old, (old + shift[1]).float().double(), advantages, rows / 3 + 1)


def close(got: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool((got.double() - expected.double()).norm() <= tolerance * expected.double().norm() + 1e-30)


def assert_agree(got: Any, expected: Any, tolerance: float) -> None:
    (result, *grads), (wanted, *wanted_grads) = got, expected
    assert close(result.loss, wanted.loss, tolerance * 10), (result.loss, wanted.loss)  # its terms cancel
    assert close(result.log_probs, wanted.log_probs, tolerance)
    assert close(result.entropy, wanted.entropy, tolerance)
    for a, b in zip(grads, wanted_grads, strict=True):
        assert torch.isfinite(a).all()
        assert close(a, b, tolerance), float((a.double() - b).norm() / b.norm())
    # Gaps are differences of log-probs, so their error is relative to the larger of those.
    absolute = tolerance * max([1e-1, *wanted.log_probs.abs().tolist()])
    for key in algo_loss.SUMS[1:]:
        assert result.sums[key] == pytest.approx(wanted.sums[key], rel=tolerance * 10, abs=absolute), key
    for key in algo_loss.MAXIMA:
        assert result.maxima[key] == pytest.approx(wanted.maxima[key], rel=tolerance * 10, abs=absolute), key


SHAPES = [
    (1, 1, 1),
    (1, 5, 2),
    (6, 1, 5),
    (7, 3, 11),
    (33, 17, 129),
    (64, 64, 1024),
    (130, 61, 2500),
    (517, 24, 1031),
    (1300, 9, 67),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("rows", "width", "vocab"), SHAPES)
def test_agrees_with_float64(rows, width, vocab, dtype):
    case = make(rows, width, vocab, torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    got = case.call(fused.linear_ppo_loss, dtype, upstream=-2.5)
    assert got[0].loss.dtype == got[0].log_probs.dtype == reference.compute_dtype(dtype)
    assert got[1].dtype == got[2].dtype == dtype
    assert_agree(got, case.call(reference.linear_ppo_loss, upstream=-2.5), TOLERANCE[dtype])


@pytest.mark.parametrize("seed", range(20))
def test_agrees_on_random_shapes_and_settings(seed):
    g = torch.Generator().manual_seed(seed)
    rows, width, vocab = (int(torch.randint(1, most, (), generator=g)) for most in (200, 90, 3000))
    case = make(rows, width, vocab, seed=seed, scale=3.0)
    if seed % 3 == 0:
        case = dataclasses.replace(case, old=None)
    settings = {"is_cap": [0.0, 1.5][seed % 2], "temperature": 0.7, "eps_low": 0.1 * (seed % 4), "eps_high": 0.5}
    got = case.call(fused.linear_ppo_loss, torch.float32, **settings)
    assert_agree(got, case.call(reference.linear_ppo_loss, **settings), 1e-5)


def test_an_unmoved_policy_has_ratio_one():
    case = make(40, 16, 300)
    log_probs, _ = fused.linear_log_probs(case.hidden.float(), case.weight.float(), case.ids, SETTINGS["temperature"])
    result, *grads = dataclasses.replace(case, old=log_probs).call(fused.linear_ppo_loss, torch.float32)
    _, *expected = dataclasses.replace(case, old=None).call(fused.linear_ppo_loss, torch.float32)
    assert torch.equal(result.log_probs, log_probs)
    assert result.maxima["ratio_max"] == 1
    assert result.sums["approx_kl"] == 0
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_huge_logits(dtype):
    # Small integers, so that logits of up to +-1e4 have no rounding of their own; temperature 1 likewise.
    g = torch.Generator().manual_seed(3)
    hidden = torch.randint(-16, 17, (90, 40), generator=g).double()
    weight = torch.randint(-16, 17, (700, 40), generator=g).double()
    hidden[0], weight[0] = 16, 16
    assert (hidden @ weight.T).abs().max() >= 1e4
    ids = torch.randint(0, 700, (90,), generator=g)
    true, _ = reference.linear_log_probs(hidden, weight, ids, 1.0)
    old = (true + torch.randint(-1, 2, (90,), generator=g) * 0.125).float().double()
    case = Case(hidden, weight, ids, old, old, torch.randn(90, generator=g).double(), 90)
    # A log-prob of -1e4 in float32 is rounded by 5e-4, so a ratio to a stored one cannot be closer than that.
    got = case.call(fused.linear_ppo_loss, dtype, temperature=1.0)
    assert_agree(got, case.call(reference.linear_ppo_loss, temperature=1.0), max(TOLERANCE[dtype], 1e-3))
    case = dataclasses.replace(case, old=None)
    got = case.call(fused.linear_ppo_loss, dtype, temperature=1.0, is_cap=0.0)
    expected = case.call(reference.linear_ppo_loss, temperature=1.0, is_cap=0.0)
    assert_agree(got, expected, TOLERANCE[dtype])


def test_extreme_ratios():
    case = make(60, 16, 300)
    assert case.old is not None
    old = case.old.clone()
    old[:20] = float("-inf")  # the ratio overflows to the clamp
    old[20:30] += 80  # and underflows
    old[30:40] -= 80
    case = dataclasses.replace(case, old=old)
    for is_cap in (0.0, 2.0):
        got = case.call(fused.linear_ppo_loss, torch.float32, is_cap=is_cap)
        assert_agree(got, case.call(reference.linear_ppo_loss, is_cap=is_cap), 1e-5)


def test_an_impossible_rollout_stays_out_of_the_gradient():
    case = make(10, 8, 50)
    rollout = case.rollout.clone()
    rollout[3] = float("-inf")
    got = dataclasses.replace(case, rollout=rollout).call(fused.linear_ppo_loss, torch.float32)
    expected = dataclasses.replace(case, rollout=rollout).call(reference.linear_ppo_loss)
    assert all(close(a, b, 1e-5) for a, b in zip(got[1:], expected[1:], strict=True))
    assert got[0].sums["rollout_gap"] == expected[0].sums["rollout_gap"] == float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_rows(dtype):
    result, grad_hidden, grad_weight = make(0, 8, 30).call(fused.linear_ppo_loss, dtype)
    assert result.loss.item() == 0
    assert set(result.sums.values()) | set(result.maxima.values()) == {0.0}
    assert grad_hidden.shape == (0, 8)
    assert torch.count_nonzero(grad_weight) == 0


def test_rows_that_cancel_have_no_gradient():
    case = dataclasses.replace(make(30, 8, 40), advantages=torch.zeros(30, dtype=torch.float64))
    result, *grads = case.call(fused.linear_ppo_loss, torch.float32)
    assert result.loss.item() == 0
    assert all(torch.count_nonzero(x) == 0 for x in grads)


@pytest.mark.parametrize("with_old", [True, False])
def test_reference_gradcheck(with_old):
    case = make(9, 4, 7)
    inputs = (case.hidden.requires_grad_(), case.weight.requires_grad_())
    rest = (case.ids, case.old if with_old else None, case.rollout, case.advantages, 3.0, *SETTINGS.values())

    def loss(hidden, weight):
        return reference.linear_ppo_loss(hidden, weight, *rest).loss

    if with_old:
        assert torch.autograd.gradcheck(loss, inputs)
    else:  # the ratio is 1 by definition, so finite differences see a constant; the gradient is that of log pi
        (grad,) = torch.autograd.grad(loss(*inputs), inputs[:1])
        log_probs, _ = reference.linear_log_probs(*inputs, case.ids, SETTINGS["temperature"])
        importance = (log_probs.detach() - case.rollout).exp().clamp(max=SETTINGS["is_cap"])
        surrogate = -(importance * case.advantages * log_probs).sum() / 3.0
        assert close(grad, torch.autograd.grad(surrogate, inputs[:1])[0], 1e-12)


def test_fused_gradcheck():
    case = make(9, 4, 7)
    rest = (case.ids, case.old, case.rollout, case.advantages, 3.0, *SETTINGS.values())
    inputs = (case.hidden.requires_grad_(), case.weight.requires_grad_())
    # The registered op, because the Python face allows one backward pass only.
    op = torch.ops.brorl.linear_ppo_loss
    assert torch.autograd.gradcheck(lambda h, w: op(h, w, *rest, True, True)[0], inputs)


def test_log_probs_alone():
    case = make(600, 12, 90)
    got = fused.linear_log_probs(case.hidden.float(), case.weight.float(), case.ids, 1.3)
    expected = reference.linear_log_probs(case.hidden, case.weight, case.ids, 1.3)
    assert all(close(a, b, 1e-5) for a, b in zip(got, expected, strict=True))
    assert not any(x.requires_grad for x in got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("flags", [(True, True), (True, False), (False, True), (False, False)])
def test_opcheck(dtype, flags):
    case = make(5, 4, 9)
    vector = reference.compute_dtype(dtype)
    hidden, weight = case.hidden.to(dtype).requires_grad_(flags[0]), case.weight.to(dtype).requires_grad_(flags[1])
    vectors = [x.to(vector) for x in (case.old, case.rollout, case.advantages) if x is not None]
    args = (hidden, weight, case.ids, *vectors, 3.0, *SETTINGS.values(), *flags)
    torch.library.opcheck(torch.ops.brorl.linear_ppo_loss.default, args)
    args = (hidden.detach(), weight.detach(), case.ids, 0.7)
    torch.library.opcheck(torch.ops.brorl.linear_log_probs.default, args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_repeats_bit_for_bit(dtype, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        runs = [make(700, 31, 999, seed=4).call(fused.linear_ppo_loss, dtype) for _ in range(3)]
    finally:
        torch.set_num_threads(before)
    for result, *grads in runs[1:]:
        assert (result.sums, result.maxima) == (runs[0][0].sums, runs[0][0].maxima)
        same = [(result.log_probs, runs[0][0].log_probs), (result.entropy, runs[0][0].entropy)]
        assert all(torch.equal(a, b) for a, b in [*same, *zip(grads, runs[0][1:], strict=True)])


def test_only_the_gradients_asked_for():
    case = make(12, 6, 20)
    vectors = [x.float() for x in (case.old, case.rollout, case.advantages) if x is not None]
    rest = (case.ids, *vectors, case.divisor, *SETTINGS.values())
    hidden, weight = case.hidden.float().requires_grad_(), case.weight.float()
    fused.linear_ppo_loss(hidden, weight, *rest).loss.backward()
    assert close(hidden.grad, case.call(reference.linear_ppo_loss)[1], 1e-5)
    with torch.no_grad():
        assert not fused.linear_ppo_loss(hidden, weight, *rest).loss.requires_grad


def test_a_second_backward_is_refused():
    case = make(5, 4, 9)
    vectors = [x.float() for x in (case.old, case.rollout, case.advantages) if x is not None]
    hidden = case.hidden.float().requires_grad_()
    result = fused.linear_ppo_loss(hidden, case.weight.float(), case.ids, *vectors, 3.0, *SETTINGS.values())
    result.loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        result.loss.backward()


MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"hidden": torch.zeros(5, 3)}, ValueError, r"hidden must be \[R, H\] and weight \[V, H\]"),
    ({"hidden": torch.zeros(5, 4, 1)}, ValueError, r"hidden must be \[R, H\] and weight \[V, H\]"),
    ({"hidden": torch.zeros(5, 4, dtype=torch.float16)}, TypeError, "must both be float32, float64 or bfloat16"),
    ({"weight": torch.zeros(9, 4, dtype=torch.float64)}, TypeError, "must both be float32, float64 or bfloat16"),
    ({"weight": torch.zeros(0, 4)}, ValueError, "the vocabulary is empty"),
    ({"ids": torch.zeros(4, dtype=torch.int64)}, ValueError, r"ids must be \[5\]"),
    ({"ids": torch.zeros(5, dtype=torch.int32)}, TypeError, "ids must be int64"),
    ({"ids": torch.tensor([0, 1, 9, 0, 0])}, IndexError, r"ids\[2\] is 9, outside a vocabulary of 9"),
    ({"ids": torch.tensor([0, 1, -1, 0, 0])}, IndexError, r"ids\[2\] is -1"),
    ({"old_log_probs": torch.zeros(6)}, ValueError, r"old_log_probs must be \[5\]"),
    ({"rollout_log_probs": torch.zeros(5, dtype=torch.bfloat16)}, TypeError, "rollout_log_probs must be Float"),
    ({"advantages": torch.zeros(5, 1)}, ValueError, r"advantages must be \[5\]"),
    ({"divisor": 0.0}, ValueError, "divisor must be above 0"),
    ({"temperature": 0.0}, ValueError, "temperature must be above 0"),
    ({"advantages": torch.zeros(5, device="meta")}, ValueError, "tensors are on cpu, meta; all must be on one device"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), MISTAKES)
def test_mistakes_raise_one_clear_error(wrong, error, message):
    good = {"hidden": torch.zeros(5, 4), "weight": torch.zeros(9, 4), "ids": torch.zeros(5, dtype=torch.int64)}
    vectors = {name: torch.zeros(5) for name in ("old_log_probs", "rollout_log_probs", "advantages")}
    with pytest.raises(error, match=message):
        fused.linear_ppo_loss(**(good | vectors | {"divisor": 5.0} | SETTINGS | wrong))
