"""The estimate of pass@k against enumeration."""

import itertools
import math
from fractions import Fraction

import pytest

from megatron_brorl.algo.pass_at_k import pass_at_k


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_k_subsets_with_a_right_sample(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        right = [i < c for i in range(n)]
        subsets = [any(chosen) for chosen in itertools.combinations(right, k)]
        assert pass_at_k(n, c, k) == float(Fraction(sum(subsets), len(subsets)))


def test_pass_at_k_at_the_sizes_of_a_real_run():
    assert pass_at_k(512, 1, 1) == 1 / 512
    assert pass_at_k(512, 1, 256) == 0.5
    # The code of Chen et al. (2021) computes 1 - prod(1 - k / i) over i from n - c + 1 to n, here to 12 digits.
    product = 1 - math.prod(1 - 64 / i for i in range(512 - 3 + 1, 512 + 1))
    assert pass_at_k(512, 3, 64) == pytest.approx(product, rel=1e-12)
    assert pass_at_k(8192, 8191, 4096) == 1.0
    assert pass_at_k(10**6, 1, 1) == 1e-6  # 1 - (1 - 1e-6) has only ten correct digits


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5), (0, 0, 1)])
def test_pass_at_k_refuses_impossible_counts(n, c, k):
    with pytest.raises(ValueError, match=r"must be in \["):
        pass_at_k(n, c, k)
