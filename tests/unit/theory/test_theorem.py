"""The general form of Theorem 1 against autograd, the theorem against that form, expectations by enumeration."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from unit.theory.theorem import expected_masses, first_order, general_terms, masses, theorem_1


def softmax(logits) -> torch.Tensor:
    return torch.softmax(torch.as_tensor(logits, dtype=torch.float64), -1)


def _case(seed: int):
    """Return random logits, their probabilities, counts, correct tokens and two rewards."""
    rng = np.random.default_rng(seed)
    vocabulary = int(rng.integers(5, 400))
    logits = rng.normal(size=vocabulary) * rng.choice([0.3, 1.0, 3.0])
    correct = rng.random(vocabulary) < rng.uniform(0.05, 0.95)
    correct[:2] = True, False  # with one class only, no probability could move
    p = softmax(logits)
    counts = rng.multinomial(int(rng.integers(1, 200)), p.numpy())
    rewards = float(rng.uniform(0, 2)), float(-rng.uniform(0, 2))
    return torch.from_numpy(logits), p, torch.from_numpy(counts), torch.from_numpy(correct), *rewards


def _rewards(correct, right: float, wrong: float) -> torch.Tensor:
    return torch.tensor([wrong, right], dtype=torch.float64)[correct.long()]


def test_theorem_1_is_the_general_form_for_a_reward_of_each_class():
    for seed in range(2000):
        _, p, counts, correct, right, wrong = _case(seed)
        rewards = _rewards(correct, right, wrong) * (counts > 0)
        terms = theorem_1(masses(p, counts, correct), counts.sum(), right, wrong, step=1.0)
        expected = general_terms(p, counts, rewards, correct, step=1.0)
        torch.testing.assert_close(torch.stack(terms), torch.stack(expected), rtol=1e-10, atol=1e-17)
        assert terms.sampled_right >= 0
        assert terms.sampled_wrong >= 0


def test_general_form_is_exact_with_multiplicities_and_a_baseline():
    """Weights c_i (R_i - b): against autograd on the loss that sums over draws."""
    for seed in range(300):
        logits, p, counts, correct, right, wrong = _case(seed)
        rewards = _rewards(correct, right, wrong)
        baseline = (counts * rewards).sum() / counts.sum()
        weights = counts * (rewards - baseline)
        terms = general_terms(p, counts, weights, correct, step=1.0)

        z = logits.clone().requires_grad_()
        tokens = torch.arange(len(p)).repeat_interleave(counts)
        advantages = (rewards - baseline)[tokens]
        (dz,) = torch.autograd.grad((advantages * torch.softmax(z, 0)[tokens]).mean(), z)
        (dq,) = torch.autograd.grad(torch.softmax(z, 0)[correct].sum(), z)
        size = float((dq * dz).abs().sum())
        assert float(terms.total) == pytest.approx(float(dq @ dz), abs=1e-12 * size)  # autograd rounds by processor


def test_multiplicities_break_the_guarantee():
    """Two right tokens with p = 0.5 and 0.1, drawn once and ten times: sum of c p^2 - S A_2 = 0.35 - 1.5 * 0.26."""
    p, counts = torch.tensor([0.5, 0.1, 0.4], dtype=torch.float64), torch.tensor([1, 10, 0])
    terms = general_terms(p, counts, counts.double(), torch.tensor([True, True, False]), step=11.0)
    assert terms.sampled_right == pytest.approx(-0.04 * 0.4)


def test_policy_gradient_with_a_group_mean_never_lowers_the_mass():
    """To first order, for rewards that depend on correctness only, in every one of 2,000 random draws."""
    for seed in range(2000):
        _, p, counts, correct, right, wrong = _case(seed)
        rewards = _rewards(correct, right, wrong)
        weights = counts * (rewards - (counts * rewards).sum() / counts.sum())
        step = (weights - p * weights.sum()) / counts.sum()  # on (1/N) sum_j w_j log p_j
        total = float(first_order(p, step, correct).sum())
        # In closed form the sums of centred rewards over right and over wrong draws have the same effect.
        drawn = (p * weights)[correct].sum() * p[~correct].sum() - (p * weights)[~correct].sum() * p[correct].sum()
        assert total == pytest.approx(float(drawn / counts.sum()), rel=1e-9, abs=1e-17)
        assert total >= -1e-17


def test_expected_masses_equal_the_sum_over_all_draws():
    """Every one of 4^5 outcomes with its probability: Corollary 3 to rounding."""
    p = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    correct = torch.tensor([True, False, True, False])
    draws = torch.cartesian_prod(*[torch.arange(4)] * 5)
    counts = torch.nn.functional.one_hot(draws, 4).sum(1)
    for sampled, expected in zip(masses(p, counts, correct), expected_masses(p, correct, 5), strict=True):
        torch.testing.assert_close(expected, p[draws].prod(1) @ sampled, rtol=1e-13, atol=0)
