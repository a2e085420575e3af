"""The fused loss against the same formula in float64: values, gradients, extremes, mistakes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from ops.linear_cases import (
    EVERYTHING,
    OTHER_LOSSES,
    SETTINGS,
    SHAPES,
    TEMPERATURE,
    TOLERANCE,
    VARIANTS,
    Case,
    assert_agree,
    close,
    make,
)
from threads import with_threads

from megatron_brorl.algo.policy_loss import PolicyLossSettings, PolicyTokens
from megatron_brorl.ops.fused import linear as fused
from megatron_brorl.ops.fused.softmax import softmax_gradient_
from megatron_brorl.ops.interface import compute_dtype
from megatron_brorl.ops.reference import linear as reference


@pytest.mark.parametrize("settings", [SETTINGS, EVERYTHING])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("rows", "width", "vocab"), SHAPES)
def test_agrees_with_float64(rows, width, vocab, dtype, settings):
    case = make(rows, width, vocab, torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    result, *gradients = case.call(fused.linear_ppo_loss, dtype, settings, upstream=-2.5)
    assert result.loss.dtype == result.log_probs.dtype == compute_dtype(dtype)
    assert [x.dtype for x in gradients] == [dtype] * 2
    expected = case.call(reference.linear_ppo_loss, settings=settings, upstream=-2.5)
    assert_agree((result, *gradients), expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("settings", [*VARIANTS, *OTHER_LOSSES])
def test_every_term_agrees(settings, dtype):
    case = make(rows=240, width=20, vocab=333)
    expected = case.call(reference.linear_ppo_loss, settings=settings)
    assert_agree(case.call(fused.linear_ppo_loss, dtype, settings), expected, TOLERANCE[dtype])
    if settings.dual_clip and settings.ratio == "token":
        assert expected[0].sums["clipped_dual"] > 0


def test_padding_has_no_probability_and_no_gradient():
    case = make(rows=50, width=8, vocab=40)
    padded = dataclasses.replace(case, weight=torch.cat((case.weight, torch.full((5, 8), 1e3).double())))
    result, grad_hidden, grad_weight = padded.call(fused.linear_ppo_loss, torch.float32, EVERYTHING, vocab=40)
    assert torch.count_nonzero(grad_weight[40:]) == 0
    expected = case.call(reference.linear_ppo_loss, settings=EVERYTHING)
    assert_agree((result, grad_hidden, grad_weight[:40]), expected, 1e-5)


def test_chunks_give_what_one_chunk_gives(monkeypatch):
    case = make(rows=700, width=12, vocab=90)
    expected = case.call(fused.linear_ppo_loss, settings=EVERYTHING)
    monkeypatch.setitem(fused.CHUNK_ROWS, "cpu", 100)
    assert_agree(case.call(fused.linear_ppo_loss, settings=EVERYTHING), expected, 1e-13)


def test_an_unchanged_policy_has_ratio_one():
    case = make(rows=40, width=16, vocab=300)
    log_probs, _ = fused.linear_log_probs(case.hidden.float(), case.weight.float(), case.ids, TEMPERATURE)
    result, *grads = case.change(old_log_probs=log_probs).call(fused.linear_ppo_loss, torch.float32)
    _, *expected = case.change(old_log_probs=None).call(fused.linear_ppo_loss, torch.float32)
    assert torch.equal(result.log_probs, log_probs)
    assert result.maxima["ratio_max"] == 1
    assert result.sums["ratio"] == result.sums["tokens"] == int((case.tokens.weights != 0).sum())
    assert result.sums["approx_kl"] == 0
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_huge_logits(dtype):
    # Small integers and temperature 1 make logits of up to +-1e4 exact.
    g = torch.Generator().manual_seed(3)
    hidden = torch.randint(-16, 17, (90, 40), generator=g).double()
    weight = torch.randint(-16, 17, (700, 40), generator=g).double()
    hidden[0] = 16
    weight[0] = 16
    assert (hidden @ weight.T).abs().max() >= 1e4
    ids = torch.randint(0, 700, (90,), generator=g)
    true, _ = reference.linear_log_probs(hidden, weight, ids, temperature=1.0)
    old = (true + torch.randint(-1, 2, (90,), generator=g) * 0.125).float().double()
    advantages = torch.randn(90, generator=g).double()
    tokens = PolicyTokens(old, advantages, weights=torch.full((90,), 1 / 90).double(), old_log_probs=old)
    case = Case(hidden, weight, ids, tokens)
    # A log-prob of -1e4 in float32 is rounded by 5e-4, so a ratio to a stored log-prob cannot be more exact.
    result = case.call(fused.linear_ppo_loss, dtype, temperature=1.0)
    assert_agree(result, case.call(reference.linear_ppo_loss, temperature=1.0), max(TOLERANCE[dtype], 1e-3))
    case = case.change(old_log_probs=None)
    settings = PolicyLossSettings(entropy_coef=0.1)
    result = case.call(fused.linear_ppo_loss, dtype, settings, temperature=1.0)
    assert_agree(result, case.call(reference.linear_ppo_loss, settings=settings, temperature=1.0), TOLERANCE[dtype])


def test_extreme_ratios():
    case = make(rows=60, width=16, vocab=300)
    assert case.tokens.old_log_probs is not None
    old = case.tokens.old_log_probs.clone()
    old[:20] = float("-inf")  # The ratio overflows to the clamp.
    old[20:30] += 80  # The ratio underflows.
    old[30:40] -= 80
    rollout = case.tokens.rollout_log_probs.clone()
    rollout[:5] = float("-inf")  # equal to the old one, so no mismatch
    rollout[case.tokens.weights == 0] = 0.0
    case = case.change(old_log_probs=old, rollout_log_probs=rollout)
    for settings in (SETTINGS, EVERYTHING, dataclasses.replace(SETTINGS, is_cap=0.0)):
        result = case.call(fused.linear_ppo_loss, torch.float32, settings)
        assert_agree(result, case.call(reference.linear_ppo_loss, settings=settings), 1e-5)


def test_an_impossible_rollout_has_no_gradient():
    case = make(rows=10, width=8, vocab=50)
    rollout = case.tokens.rollout_log_probs.clone()
    rollout[3] = float("-inf")
    case = case.change(rollout_log_probs=rollout, weights=torch.ones(10).double())
    result, expected = case.call(fused.linear_ppo_loss, torch.float32), case.call(reference.linear_ppo_loss)
    assert all(close(a, b, 1e-5) for a, b in zip(result[1:], expected[1:], strict=True))
    assert result[0].sums["rollout_gap"] == expected[0].sums["rollout_gap"] == float("inf")


@pytest.mark.parametrize("settings", [*VARIANTS, *OTHER_LOSSES])
@pytest.mark.parametrize(
    ("op", "dtype"), [(fused.linear_ppo_loss, torch.float32), (reference.linear_ppo_loss, torch.float64)]
)
def test_a_masked_token_changes_nothing(op, dtype, settings):
    """Results equal those of the batch without the token, whatever its entries and its hidden state are."""
    case = make(rows=80, width=12, vocab=70)
    live = case.tokens.weights != 0
    poison = {
        name: torch.where(live, value, torch.tensor([float("nan"), float("inf")]).double().repeat(40))
        for name, value in vars(case.tokens).items()
        if name not in ("weights", "sequences")
    }
    hidden = torch.where(live[:, None], case.hidden, poison["advantages"][:, None])
    poisoned = dataclasses.replace(case.change(**poison), hidden=hidden)
    result, grad_hidden, grad_weight = poisoned.call(op, dtype, settings)
    only_live = Case(case.hidden[live], case.weight, case.ids[live], case.tokens.where(live))
    expected, live_hidden, expected_weight = only_live.call(reference.linear_ppo_loss, settings=settings)
    assert torch.count_nonzero(grad_hidden[~live]) == 0
    unmasked = dataclasses.replace(result, log_probs=result.log_probs[live], entropy=result.entropy[live])
    assert_agree((unmasked, grad_hidden[live], grad_weight), (expected, live_hidden, expected_weight), TOLERANCE[dtype])


@pytest.mark.parametrize("settings", [EVERYTHING, dataclasses.replace(SETTINGS, ratio="sequence")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 30])
def test_no_trainable_tokens(rows, dtype, settings):
    case = make(rows, width=8, vocab=30)
    case = case.change(weights=torch.zeros(rows, dtype=torch.float64))
    result, grad_hidden, grad_weight = case.call(fused.linear_ppo_loss, dtype, settings)
    assert result.loss.item() == 0
    assert set(result.sums.values()) | set(result.maxima.values()) == {0.0}
    assert grad_hidden.shape == (rows, 8)
    assert torch.count_nonzero(grad_hidden) == torch.count_nonzero(grad_weight) == 0


@pytest.mark.parametrize("settings", VARIANTS)
def test_reference_gradcheck(settings):
    case = make(rows=9, width=4, vocab=7)
    inputs = (case.hidden.requires_grad_(), case.weight.requires_grad_())

    def loss(hidden, weight):
        return reference.linear_ppo_loss(hidden, weight, case.ids, case.tokens, settings, TEMPERATURE).loss

    assert torch.autograd.gradcheck(loss, inputs)


@pytest.mark.parametrize("op", [reference.linear_log_probs, fused.linear_log_probs])
def test_gradcheck_of_log_probs_and_entropy(op):
    case = make(rows=9, width=4, vocab=7)
    inputs = (case.hidden.requires_grad_(), case.weight.requires_grad_())
    assert torch.autograd.gradcheck(lambda h, w: op(h, w, case.ids, temperature=1.3), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_results_are_reproducible_bit_for_bit(dtype, threads):
    case = make(rows=700, width=31, vocab=999, seed=4)
    runs = with_threads(lambda: case.call(fused.linear_ppo_loss, dtype, EVERYTHING), (threads,) * 3)
    (first, *first_grads), *others = runs
    for result, *grads in others:
        assert (result.sums, result.maxima) == (first.sums, first.maxima)
        same = [(result.log_probs, first.log_probs), (result.entropy, first.entropy)]
        assert all(torch.equal(a, b) for a, b in [*same, *zip(grads, first_grads, strict=True)])


def test_only_requested_gradients_are_computed():
    case = make(rows=12, width=6, vocab=20)
    rest = (case.ids, case.tokens_in(torch.float32), SETTINGS, TEMPERATURE)
    hidden, weight = case.hidden.float().requires_grad_(), case.weight.float()
    fused.linear_ppo_loss(hidden, weight, *rest).loss.backward()
    assert close(hidden.grad, case.call(reference.linear_ppo_loss)[1], 1e-5)
    with torch.no_grad():
        assert not fused.linear_ppo_loss(hidden, weight, *rest).loss.requires_grad


def test_a_second_backward_is_refused():
    case = make(rows=5, width=4, vocab=9)
    hidden = case.hidden.float().requires_grad_()
    result = fused.linear_ppo_loss(
        hidden, case.weight.float(), case.ids, case.tokens_in(torch.float32), SETTINGS, TEMPERATURE
    )
    result.loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        result.loss.backward()


MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"hidden": torch.zeros(5, 3)}, ValueError, r"cannot write \[5, 3\] times \[4, 9\]"),
    ({"weight": torch.zeros(9, 4, dtype=torch.float64)}, TypeError, "cannot multiply Float by Double"),
    ({"vocab": 10}, ValueError, "a vocabulary of 10 does not fit 1 x 9 rows"),
    ({"ids": torch.zeros(5, dtype=torch.int32)}, TypeError, "ids must be int64"),
    ({"ids": torch.tensor([0, 1, 9, 0, 0])}, IndexError, "ids are from 0 to 9, outside a vocabulary of 9"),
    ({"ids": torch.tensor([0, 1, -1, 0, 0])}, IndexError, "ids are from -1 to 1"),
    ({"rollout_log_probs": torch.zeros(5, dtype=torch.bfloat16)}, TypeError, "rollout_log_probs must be Float"),
    ({"advantages": torch.zeros(5, 1)}, ValueError, r"advantages must be \[5\]"),
    ({"settings": EVERYTHING}, ValueError, "needs reference_log_probs"),
    ({"settings": PolicyLossSettings(ratio="sequence")}, ValueError, "needs tokens.sequences"),
    ({"advantages": torch.zeros(5, device="meta")}, ValueError, "tensors are on cpu, meta; all must be on one device"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), MISTAKES)
def test_mistakes_raise_one_clear_error(wrong, error, message):
    good = {"hidden": torch.zeros(5, 4), "weight": torch.zeros(9, 4), "ids": torch.zeros(5, dtype=torch.int64)}
    vectors = {name: torch.zeros(5) for name in ("old_log_probs", "rollout_log_probs", "advantages")}
    vectors["weights"] = torch.ones(5)
    tokens = PolicyTokens(**{k: wrong.pop(k, v) for k, v in vectors.items()})
    rest = {"tokens": tokens, "settings": SETTINGS, "temperature": 1.0}
    with pytest.raises(error, match=message):
        fused.linear_ppo_loss(**(good | rest | wrong))


DEAD: dict[str, Any] = {  # rows without an advantage
    "none": [],
    "all": range(300),
    "the first chunk": range(100),
    "the middle": range(90, 230),
    "every other": range(0, 300, 2),
}


@pytest.mark.parametrize("entropy_coef", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dead", DEAD)
def test_only_tokens_without_a_gradient_are_left_out(dead, dtype, entropy_coef, monkeypatch):
    monkeypatch.setitem(fused.CHUNK_ROWS, "cpu", 100)
    case = make(rows=300, width=24, vocab=700, dtype=dtype)
    advantages = case.tokens.advantages.clone()
    advantages[list(DEAD[dead])] = 0
    case = case.change(advantages=advantages)
    settings = dataclasses.replace(SETTINGS, entropy_coef=entropy_coef)  # An entropy bonus gives all rows a gradient.
    expected = case.call(reference.linear_ppo_loss, settings=settings)
    chunk_rows = []

    def count_rows(logits, *arguments):
        chunk_rows.append(len(logits))
        softmax_gradient_(logits, *arguments)

    monkeypatch.setattr(fused, "softmax_gradient_", count_rows)
    assert_agree(case.call(fused.linear_ppo_loss, dtype, settings), expected, TOLERANCE[dtype])
    assert sum(chunk_rows) == int((expected[1].norm(dim=1) > 0).sum())
