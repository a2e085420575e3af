"""Estimates of the KL divergence from log-probabilities of sampled tokens."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) is far outside of any clip range and far from overflow in float32

KlEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(log_ratio: Tensor, estimator: KlEstimator) -> Tensor:
    """Return estimates [R] of KL(pi || pi_ref) from log pi - log pi_ref [R] of tokens drawn from pi (Schulman 2020).

    k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, with d within +-MAX_LOG_RATIO. As a loss, the mean gradient of k1 is
    zero, that of k2 is the gradient of the KL, that of k3 the gradient of the reverse KL(pi_ref || pi).
    """
    d = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return d
    return d.square() / 2 if estimator == "k2" else (-d).exp() - 1 + d
