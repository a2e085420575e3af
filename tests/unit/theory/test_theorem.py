"""Theorem 1 of BroRL against extended precision. docs/theory.md has its symbols and derivation."""

import numpy as np
import pytest
import torch

LONG = np.longdouble  # on x86 64 bits of mantissa, 11 more than float64


def random_case(seed):
    """Return logits, probabilities, the counts of draws, the correct tokens and the reward of each token."""
    rng = np.random.default_rng(seed)
    vocabulary = int(rng.integers(5, 400))
    logits = rng.normal(size=vocabulary) * rng.choice([0.3, 1.0, 3.0])
    correct = rng.random(vocabulary) < rng.uniform(0.05, 0.95)
    correct[:2] = True, False  # with one class only, no probability could move
    p = torch.softmax(torch.from_numpy(logits), -1)
    counts = rng.multinomial(int(rng.integers(1, 200)), p.numpy())
    rewards = torch.from_numpy(np.where(correct, rng.uniform(0, 2), -rng.uniform(0, 2)))
    return torch.from_numpy(logits), p, torch.from_numpy(counts), torch.from_numpy(correct), rewards


def first_order(p, weights, correct, n):
    """Return dQ_pos at step 1 in extended precision: the gradient of (1/n) sum_j w_j p_j, times dQ_pos/dz."""
    p, w = p.numpy().astype(LONG), weights.numpy().astype(LONG)
    p = p / p.sum()
    dz = p * (w - (w * p).sum()) / int(n)
    return (p * (dz - (p * dz).sum()))[correct.numpy()].sum()


def test_theorem_1_is_exact_on_2000_random_cases():
    for seed in range(2000):
        _, p, counts, correct, rewards = random_case(seed)
        is_sampled, n = counts > 0, counts.sum()
        a, b = p * (is_sampled & correct), p * (is_sampled & ~correct)
        u_pos, u_neg = p * (~is_sampled & correct), p * (~is_sampled & ~correct)
        q_pos, q_neg = a.sum() + u_pos.sum(), b.sum() + u_neg.sum()
        right, wrong = rewards[correct][0], rewards[~correct][0]
        s_r = right * a.sum() + wrong * b.sum()
        terms = [(right - s_r) * q_neg * (a @ a), (s_r - wrong) * q_pos * (b @ b)]
        assert min(terms) >= 0
        terms.append(s_r * (q_pos * (u_neg @ u_neg) - q_neg * (u_pos @ u_pos)))
        expected = first_order(p, rewards * is_sampled, correct, n)
        assert float(sum(terms) / n) == pytest.approx(float(expected), rel=1e-12)
