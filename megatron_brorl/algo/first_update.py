"""Advice if the first update of a run changed the policy too much."""

from __future__ import annotations

from collections.abc import Mapping

LARGE_KL = 0.2  # nats; a model of 135M parameters lost its accuracy after a first KL of 0.29


def large_first_update(metrics: Mapping[str, float | None], lr: float) -> str:
    """Return advice if approx_kl of the first step that updated the model is above LARGE_KL, else "".

    metrics: those of that step. lr: optim.lr.
    """
    kl = metrics.get("approx_kl") or 0.0
    if not kl > LARGE_KL:
        return ""
    return (
        f"the first update changed the policy by {kl:.2g} nats (approx_kl above {LARGE_KL:g}): lower optim.lr = {lr:g}"
    )
