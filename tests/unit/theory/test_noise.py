"""The estimates of a gradient's noise against all draws of small policies, whose true gradients are known."""

from __future__ import annotations

import math
from itertools import permutations, product

import numpy as np
import pytest

from megatron_brorl.theory.noise import HalfGradients, gradient_noise

# Of each kind of prompt: where its outcomes' logits lie in the weights, and which outcomes are right. The kinds share
# weights, so that a step on one moves the other.
WEIGHTS = np.array([0.3, -0.5, 0.1, 0.8])
KINDS = [((0, 1), (1, 0)), ((1, 2, 3), (0, 1, 0))]


def policy(kind):
    """Probabilities [V], scores [V, weights] and worths [V] of a kind's outcomes."""
    at, right = KINDS[kind]
    p = np.exp(WEIGHTS[list(at)])
    p /= p.sum()
    one_hot = np.eye(len(WEIGHTS))[list(at)]
    return p, one_hot - p @ one_hot, np.array(right, dtype=float)


def draws(kind, n):
    """Chance, worths [n] and scores [n, weights] of every way to draw n siblings."""
    p, scores, right = policy(kind)
    for drawn in product(range(len(p)), repeat=n):
        yield p[list(drawn)].prod(), right[list(drawn)], scores[list(drawn)]


def gradient(right, scores):
    """By REINFORCE, the mean of the others as each sibling's baseline, written out."""
    n = len(right)
    return sum((right[i] - np.delete(right, i).mean()) * scores[i] for i in range(n)) / n


def truth(n):
    """True gradients of the kinds, and what the gradient from n siblings varies about them, by summing over draws."""
    means, spreads = [], []
    for kind in range(len(KINDS)):
        p, scores, right = policy(kind)
        means.append((p * right) @ scores)
        found = [(chance, gradient(r, s)) for chance, r, s in draws(kind, n)]
        assert np.allclose(sum(c * g for c, g in found), means[-1], atol=1e-14)  # unbiased
        spreads.append(sum(c * ((g - means[-1]) ** 2).sum() for c, g in found))
    return np.array(means), np.array(spreads)


def prompt(n):
    """(chance, has a signal, gradients of both halves) of a prompt that is drawn at random, over all draws."""
    found = []
    for kind in range(len(KINDS)):
        for chance, right, scores in draws(kind, n):
            a, b = gradient(right[: n // 2], scores[: n // 2]), gradient(right[n // 2 :], scores[n // 2 :])
            found.append((chance / len(KINDS), len(set(right)) > 1, a, b))
    return found


def halves(taken, n):
    """As the trainer finds them: each prompt against the sum of those before it."""
    found, before = [], np.zeros(len(WEIGHTS))
    for a, b in taken:
        both = (a + b) / 2
        found.append(HalfGradients(a @ b, ((a - b) ** 2).sum(), before @ both, (n // 2, n - n // 2)))
        before = before + both
    return found


def test_estimates_are_unbiased_over_all_draws():
    """Two prompts of four siblings; those without a signal give no gradient and are left out of what is measured."""
    n, total, weight = 4, np.zeros(4), 0.0
    for one, other in product(prompt(n), repeat=2):
        taken = [(a, b) for _, signal, a, b in (one, other) if signal]
        noise = gradient_noise(halves(taken, n), len(taken), 2)
        total += one[0] * other[0] * np.array([noise.own_effect, noise.other_effect, noise.between, noise.within])
        weight += one[0] * other[0]
    assert weight == pytest.approx(1)

    means, spreads = truth(n // 2)
    own, other = (means**2).sum(1).mean(), (means.mean(0) ** 2).sum()
    between = ((means - means.mean(0)) ** 2).sum(1).mean()
    assert between > 0.01
    # Leave-one-out from two siblings: n - 1 is 1.
    assert total == pytest.approx([own, other, between, spreads.mean()], abs=1e-13)


def test_they_are_of_the_kind_of_which_the_variance_is():
    """Of the mean gradient over two prompts of two siblings, by summing over its draws."""
    means, _ = truth(2)
    one = [(chance / 2, gradient(r, s)) for kind in (0, 1) for chance, r, s in draws(kind, 2)]
    centre = means.mean(0)
    variance = sum(c * d * (((g + h) / 2 - centre) ** 2).sum() for (c, g), (d, h) in product(one, repeat=2))
    between = ((means - centre) ** 2).sum(1).mean()
    assert variance == pytest.approx((between + truth(2)[1].mean() / (2 - 1)) / 2, abs=1e-14)


def test_some_of_the_prompts_stand_for_all():
    """All choices of three out of four with a signal, in every order, among six: on average what all four give."""
    rng = np.random.default_rng(0)
    gradients = [(rng.normal(size=4), rng.normal(size=4)) for _ in range(4)]
    whole = gradient_noise(halves(gradients, 5), 4, 6)
    choices = [[gradients[i] for i in ids] for ids in permutations(range(4), 3)]
    parts = [gradient_noise(halves(choice, 5), 4, 6) for choice in choices]
    for name in ("own_effect", "other_effect", "between", "within"):
        assert np.mean([getattr(p, name) for p in parts]) == pytest.approx(getattr(whole, name), abs=1e-13)
    # Written out: six prompts of which two give nothing; halves of two and three siblings.
    both = [(a + b) / 2 for a, b in gradients]
    pairs = [both[i] @ both[j] for i, j in product(range(4), repeat=2) if i != j]
    assert whole.own_effect == pytest.approx(sum(a @ b for a, b in gradients) / 6)
    assert whole.other_effect == pytest.approx(sum(pairs) / 30)
    assert whole.within == pytest.approx(sum(((a - b) ** 2).sum() / (1 + 1 / 2) for a, b in gradients) / 6)


def test_what_cannot_be_known():
    one = [HalfGradients(1.0, 2.0, 0.0, (2, 2))]
    assert math.isnan(gradient_noise(one, 1, 1).between)  # no second prompt
    assert math.isnan(gradient_noise(one, 5, 9).other_effect)  # none was looked at
    # A second prompt without a signal is known to give nothing.
    assert gradient_noise(one, 1, 2).other_effect == 0
    assert gradient_noise(one, 1, 2).own_effect == 0.5
    assert gradient_noise([], 0, 3).within == 0
    for arguments in ((one, 0, 3), ([], 2, 3), (one, 4, 3)):
        with pytest.raises(ValueError, match="prompts with a signal"):
            gradient_noise(*arguments)
