"""Theorem 1 against autograd and extended precision, its finite step, the general form, expectations by sampling."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from megatron_brorl.theory.mass_balance import (
    draw_weights,
    expected_masses,
    first_order,
    general_terms,
    masses,
    missing,
    score_step,
    softmax,
    surrogate_step,
    theorem_1,
)

LONG = np.longdouble  # 64 bits of mantissa on x86: eleven more than what is tested


def _case(seed: int):
    """Probabilities, draw counts, correct mask and rewards at random, from nearly flat to nearly deterministic."""
    rng = np.random.default_rng(seed)
    vocabulary = int(rng.integers(5, 400))
    logits = rng.normal(size=vocabulary) * rng.choice([0.3, 1.0, 3.0])
    correct = rng.random(vocabulary) < rng.uniform(0.05, 0.95)
    correct[:2] = True, False  # with one class only, nothing can move between them
    p = softmax(logits)
    counts = rng.multinomial(int(rng.integers(1, 200)), p)
    return logits, p, counts, correct, float(rng.uniform(0, 2)), float(-rng.uniform(0, 2))


def _linearised(p, weights, correct, n):
    """dQ_pos at step 1 from the definitions, in extended precision: gradient of J, then the softmax Jacobian."""
    p, w = p.astype(LONG), weights.astype(LONG)
    p = p / p.sum()
    dz = np.array([(w[j] - (w * p).sum()) * p[j] for j in range(len(p))]) / n
    dp = p * (dz - (p * dz).sum())
    return dp[correct].sum(), np.abs(dp).sum()


def test_theorem_1_is_exact_on_2000_random_cases():
    worst = 0.0
    for seed in range(2000):
        _, p, counts, correct, right, wrong = _case(seed)
        rewards = np.where(counts > 0, np.where(correct, right, wrong), 0.0)
        terms = theorem_1(masses(p, counts, correct), right, wrong, step=1.0)
        expected, _ = _linearised(p, rewards, correct, counts.sum())
        worst = max(worst, abs(float((terms.total - expected) / expected)))
        assert terms.sampled_right >= 0
        assert terms.sampled_wrong >= 0
    assert worst < 1e-12


def test_general_form_is_exact_with_multiplicities_and_a_baseline():
    """Weights c_i (R_i - b): against autograd on the loss that sums over draws, and against extended precision."""
    for seed in range(300):
        logits, p, counts, correct, right, wrong = _case(seed)
        rewards = np.where(correct, right, wrong)
        baseline = (counts * rewards).sum() / counts.sum()
        weights = draw_weights(counts, rewards - baseline)
        terms = general_terms(p, counts, weights, correct, step=1.0)

        z = torch.tensor(logits, requires_grad=True)
        tokens = torch.tensor(np.repeat(np.arange(len(p)), counts))
        advantages = torch.tensor((rewards - baseline)[tokens.numpy()])
        (dz,) = torch.autograd.grad((advantages * torch.softmax(z, 0)[tokens]).mean(), z)
        (dq,) = torch.autograd.grad(torch.softmax(z, 0)[torch.tensor(correct)].sum(), z)
        size = float((dq * dz).abs().sum())
        assert float(terms.total) == pytest.approx(float(dq @ dz), abs=1e-12 * size)  # autograd rounds by processor
        expected, scale = _linearised(p, weights, correct, counts.sum())
        assert abs(float(terms.total - expected)) <= 1e-13 * float(scale)


def test_distinct_sets_and_multiplicities_are_different_things():
    """The counter-example: two right tokens with p = 0.5 and 0.1, drawn once and ten times, nothing wrong drawn."""
    p, correct = np.array([0.5, 0.1, 0.4]), np.array([True, True, False])
    counts = np.array([1, 10, 0])
    terms = general_terms(p, counts, draw_weights(counts, np.ones(3)), correct, step=11.0)
    # S = 0.5 + 1 = 1.5; sum of c p^2 - S A_2 = 0.35 - 1.5 * 0.26 = -0.04, times Q_neg = 0.4.
    assert terms.s_r == pytest.approx(1.5)
    assert terms.sampled_right == pytest.approx(-0.04 * 0.4)
    distinct = theorem_1(masses(p, counts, correct), 1.0, -1.0, step=11.0)
    assert distinct.s_r == pytest.approx(0.6)
    assert distinct.sampled_right == pytest.approx((1 - 0.6) * 0.4 * 0.26)


def test_finite_step_errs_with_the_square_of_the_step():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=1000)
    correct = np.arange(1000) < 100
    p = softmax(logits)
    counts = rng.multinomial(64, p)
    rewards = np.where(counts > 0, np.where(correct, 1.0, -1.0), 0.0)
    ratios = []
    for step in (100.0, 10.0, 1.0):
        moved = softmax((logits + surrogate_step(p, rewards, 64, step)).astype(LONG).astype(np.float64))
        measured = moved[correct].sum() - p[correct].sum()
        ratios.append((measured - theorem_1(masses(p, counts, correct), 1.0, -1.0, step).total) / step**2)
    assert ratios[0] == pytest.approx(ratios[1], rel=0.1)
    assert ratios[1] == pytest.approx(ratios[2], rel=0.02)


def test_surrogate_and_score_steps_are_gradients():
    """Central differences of (1/n) sum w p and (1/n) sum w log p."""
    rng = np.random.default_rng(1)
    logits, weights, step = rng.normal(size=12), rng.normal(size=12) * (rng.random(12) < 0.5), 1e-5
    for function, gradient in (
        (lambda z: (weights * softmax(z)).sum() / 7, surrogate_step(softmax(logits), weights, 7, 1.0)),
        (lambda z: (weights * np.log(softmax(z))).sum() / 7, score_step(softmax(logits), weights, 7, 1.0)),
    ):
        shifts = np.eye(12) * step
        numeric = [(function(logits + d) - function(logits - d)) / (2 * step) for d in shifts]
        np.testing.assert_allclose(gradient, numeric, atol=1e-10)


def test_group_mean_leaves_undrawn_logits_where_they_are():
    _, p, counts, correct, *_ = _case(5)
    rewards = correct.astype(float)
    weights = draw_weights(counts, rewards - (counts * rewards).sum() / counts.sum())
    assert np.abs(score_step(p, weights, counts.sum(), 1.0)[counts == 0]).max() < 1e-15
    assert np.abs(surrogate_step(p, weights, counts.sum(), 1.0)[counts == 0]).max() > 1e-9


def test_policy_gradient_with_a_group_mean_never_lowers_the_mass():
    """To first order, for rewards that depend on correctness only, in every one of 2,000 random draws."""
    for seed in range(2000):
        _, p, counts, correct, right, wrong = _case(seed)
        rewards = np.where(correct, right, wrong)
        weights = draw_weights(counts, rewards - (counts * rewards).sum() / counts.sum())
        parts = first_order(p, score_step(p, weights, counts.sum(), 1.0), correct)
        # In closed form: the centred rewards' sums over right and over wrong draws pull the same way.
        drawn = (p * weights)[correct].sum() * p[~correct].sum() - (p * weights)[~correct].sum() * p[correct].sum()
        assert parts.sum() == pytest.approx(drawn / counts.sum(), rel=1e-9, abs=1e-17)
        assert parts.sum() >= -1e-17


def test_graded_values():
    """Q = sum of value times p for values that are no mask: against central differences."""
    rng = np.random.default_rng(2)
    logits, value, direction = rng.normal(size=9), rng.random(9), rng.normal(size=9)
    h = 1e-5
    numeric = ((softmax(logits + h * direction) - softmax(logits - h * direction)) * value).sum() / (2 * h)
    assert first_order(softmax(logits), direction, value).sum() == pytest.approx(numeric, abs=1e-9)


def test_expected_masses_equal_the_sum_over_all_draws():
    """Every one of 4^5 outcomes with its probability: Corollary 3 to rounding."""
    p, correct = np.array([0.5, 0.3, 0.15, 0.05]), np.array([True, False, True, False])
    draws = list(itertools.product(range(4), repeat=5))
    probabilities = np.array([np.prod(p[list(d)]) for d in draws])
    counts = np.array([np.bincount(d, minlength=4) for d in draws])
    sampled, expected = masses(p, counts, correct), expected_masses(p, correct, 5)
    for field in ("p_pos", "p_neg", "u_pos", "u_neg", "a2", "b2", "u_pos2", "u_neg2"):
        assert getattr(expected, field) == pytest.approx((probabilities * getattr(sampled, field)).sum(), rel=1e-13)


@pytest.mark.parametrize(("p", "n"), [(0.5, 4), (0.1, 16), (0.01, 16), (0.01, 512), (0.001, 512), (1e-3, 4096)])
def test_lemma_2_by_sampling(p: float, n: int):
    """E[p^2 1{not drawn}] = p^2 (1 - p)^n within three standard errors of a million trials."""
    trials = 1_000_000
    gone = np.random.default_rng(n).binomial(n, p, size=trials) == 0
    expected = float(missing(np.array([p]), n)[0])
    assert abs(gone.mean() - expected) < 3 * np.sqrt(expected * (1 - expected) / trials)


def test_corollary_3_by_sampling():
    rng = np.random.default_rng(3)
    p = softmax(rng.normal(size=500) * 2)
    correct = rng.random(500) < 0.3
    for n in (4, 16, 64, 256):
        sampled = masses(p, rng.multinomial(n, p, size=4000), correct)
        expected = expected_masses(p, correct, n)
        for field in ("u_pos2", "u_neg2", "a2", "b2"):
            x = getattr(sampled, field)
            assert abs(x.mean() - getattr(expected, field)) < 3 * x.std() / np.sqrt(len(x)), (n, field)


def test_powers_at_the_edges():
    p = np.array([0.0, 1e-18, 1e-12, 1.0])
    assert missing(p, 0).tolist() == [1, 1, 1, 1]
    gone = missing(p, 51200)
    assert gone[[0, 3]].tolist() == [1.0, 0.0]
    assert 1 - gone[2] == pytest.approx(5.12e-8, rel=1e-6)
    seen = expected_masses(p[None, 1:2], np.array([True]), 51200)
    assert seen.p_pos[0] == pytest.approx(1e-18 * 51200 * 1e-18, rel=1e-12)  # 1 - (1 - p)^n would be 0
    with pytest.raises(ValueError, match="cannot be negative"):
        missing(p, -1)


def test_torch_agrees_with_numpy_over_a_batch():
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(3, 2, 50))
    correct = rng.random(50) < 0.4
    p = softmax(logits)
    counts = rng.multinomial(20, p)
    weights = draw_weights(counts, np.where(correct, 0.7, -0.3))
    t = torch.from_numpy
    np.testing.assert_allclose(softmax(t(logits)).numpy(), p, rtol=1e-13)
    for ours, theirs in (
        (
            theorem_1(masses(p, counts, correct), 1.0, -1.0, 0.1),
            theorem_1(masses(t(p), t(counts), t(correct)), 1.0, -1.0, 0.1),
        ),
        (general_terms(p, counts, weights, correct, 0.1), general_terms(t(p), t(counts), t(weights), t(correct), 0.1)),
        (expected_masses(p, correct, 33), expected_masses(t(p), t(correct), 33)),
    ):
        for name, value in vars(ours).items():
            np.testing.assert_allclose(getattr(theirs, name).numpy(), value, rtol=1e-10, atol=1e-18)
            assert value.shape == (3, 2)
