"""The estimators behind advantages, against all outcomes of a small case."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from megatron_brorl.algo.advantage import over_group_mean


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("logits", [[0.3, -1.0, 0.8], [2.5, 0.0, -3.0]])
def test_over_group_mean_is_unbiased_for_the_truncated_logarithm(n, logits):
    """Over all 3^n draws of a softmax: E[mean_i A_i grad log p(y_i)] = grad sum_{k=1}^{n-1} -(1 - p)^k / k."""
    x = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    p = x.softmax(0)
    right = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)  # two of three outcomes are right

    # The truncated logarithm of the success rate, by autograd.
    wrong = 1 - (p * right).sum()
    objective = -sum(wrong**k / k for k in range(1, n))
    (wanted,) = torch.autograd.grad(objective, x)

    # grad log p(y) of a softmax is the outcome's unit vector minus p.
    p, scores = p.detach(), torch.eye(3, dtype=torch.float64) - p.detach()
    expected = torch.zeros(3, dtype=torch.float64)
    for draws in product(range(3), repeat=n):
        advantages = over_group_mean(right[list(draws)])
        expected += p[list(draws)].prod() * (advantages[:, None] * scores[list(draws)]).mean(0)
    torch.testing.assert_close(expected, wanted, rtol=1e-12, atol=1e-12)


def test_over_group_mean_of_equal_rewards_is_exactly_zero():
    for rewards in ([0.0] * 4, [1.0] * 4, [0.95] * 512, [0.5]):
        assert torch.equal(over_group_mean(torch.tensor(rewards)), torch.zeros(len(rewards)))
