"""95% intervals for what siblings left unsampled. Chosen by coverage: docs/measurements/estimators.md has the table."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float64]

Z95 = 1.959964
TAIL = 0.025  # probability beyond either end


def unseen_mass(n: int, once: int, twice: int) -> tuple[float, float]:
    """Ends for the mass of outcomes that none of n draws had; once, twice: n_1 and n_2 outcomes that came so often.

    Esty (1983) has n_1 / n -+ 1.96 sqrt(n_1 (1 - n_1 / n) + 2 n_2) / n, which is for many of each kind: few make
    certainties, such as [1, 1] where all outcomes differ. Here it is every mass m with
    |n_1 - n m| <= 1.96 sqrt(n m (1 - m) + 2 (n_2 + 1)): his variance at m, not at its estimate, as Wilson (1927) does
    for shares, and one more outcome that came twice. The upper end is never below 1 - 0.025^(1/n), as n draws cannot
    rule out a smaller mass.
    """
    # The two roots of a quadratic in m.
    square, linear = n * n + Z95**2 * n, 2 * n * once + Z95**2 * n
    constant = once**2 - Z95**2 * 2 * (twice + 1)
    root = (linear**2 - 4 * square * constant) ** 0.5
    low, high = (linear - root) / (2 * square), (linear + root) / (2 * square)
    return max(low, 0.0), min(max(high, 1 - TAIL ** (1 / n)), 1.0)


def weighted_counts(total: Floats, variance: Floats, largest: Floats) -> tuple[Floats, Floats]:
    """Ends [...] of the interval of a weighted sum of Poisson counts' mean (Fay and Feuer 1997, section 2); all [...].

    total = sum w n and variance = sum w^2 n of counts n with weights w >= 0; largest: the largest w, above 0. A gamma
    distribution of that mean and variance; the upper end counts one more of the largest weight, so that it is 3.69 of
    them where nothing was counted. With equal weights it is Garwood's exact interval.
    """
    mean = np.stack([total, total + largest])
    scale = np.divide(np.stack([variance, variance + largest**2]), mean, out=np.zeros_like(mean), where=mean > 0)
    shape = np.divide(mean, scale, out=np.ones_like(mean), where=scale > 0)
    low, high = scale * _gamma_ends(shape)
    return low, high


def _gamma_ends(shape: Floats) -> Floats:
    """The lower end of the first and the upper end of the second gamma distributions with scale 1, by bisection.

    shape and result [2, ...].
    """
    a = torch.as_tensor(shape, dtype=torch.float64)
    probability = torch.tensor([TAIL, 1 - TAIL], dtype=torch.float64).view(2, *[1] * (a.ndim - 1))
    low, high = torch.zeros_like(a), a + 12 * a.sqrt() + 20  # beyond any quantile that is asked for
    for _ in range(42):  # to 1e-11
        middle = (low + high) / 2
        below = torch.special.gammainc(a, middle) < probability
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    result: Floats = ((low + high) / 2).numpy()
    return result
