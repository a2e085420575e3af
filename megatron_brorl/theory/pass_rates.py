"""Success rates of prompts, and the share of prompts whose group of N rollouts would have a learning signal."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)


def mixed_share(right: Ints, rollouts: Ints, n: int) -> float:
    """Return the mean over prompts of the probability 1 - p^n - (1 - p)^n that n rollouts are mixed.

    right, rollouts [P]: correct and all recorded rollouts of each prompt. For n up to a prompt's rollouts this is the
    unbiased estimate: the share of its subsets of n rollouts that are mixed. For larger n it is whether all of its
    rollouts are mixed, which is a lower bound in expectation, because the recorded rollouts cannot tell a success rate
    of 0 from a small one.
    """
    shares = [_mixed(int(r), int(m), n) for r, m in zip(right, rollouts, strict=True)]
    return float(np.mean(shares))


def _mixed(right: int, rollouts: int, n: int) -> float:
    n = min(n, rollouts)
    # The products are C(right, n) / C(rollouts, n) and C(wrong, n) / C(rollouts, n).
    drawn = np.arange(n)
    wrong = rollouts - right
    all_right = np.prod(np.maximum(right - drawn, 0) / (rollouts - drawn))
    all_wrong = np.prod(np.maximum(wrong - drawn, 0) / (rollouts - drawn))
    return float(1 - all_right - all_wrong)
