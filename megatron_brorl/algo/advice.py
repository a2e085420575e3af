"""Advice from metrics: why no group has a learning signal, and a first update that is too large."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Cause = Literal["cut off", "no answer", "none right", "all right", "no mixed group"]

METRICS: tuple[str, ...] = ("kept_share", "reward_std", "cut_off_share", "answered_share", "all_right_share")
METRICS += ("teacher_kl", "group_errors")  # of runs with other signals than verifiers
LARGE_KL = 0.2  # nats; a model of 135M parameters lost its accuracy after a first KL of 0.29
MOST_CUT_OFF = 0.9  # from this share of responses on, cutting off is the cause


def why_no_signal(shares: Mapping[str, float | None]) -> Cause | None:
    """Return the first cause that explains why no group has a signal; None if one has, or if the metrics are missing.

    shares: METRICS of a step, or their means over steps. Earlier causes explain later ones: a response that was cut off
    has no answer, and a response without an answer is not right.
    """
    known = {name: value for name, value in shares.items() if value is not None and value == value}  # NaN is unknown
    if "teacher_kl" in known:  # A teacher is a signal for every group.
        return None
    # Without dynamic sampling all groups are kept, so only reward_std shows whether rewards differ.
    if known.get("kept_share") != 0 and known.get("reward_std") != 0:
        return None
    if known.get("cut_off_share", 0.0) >= MOST_CUT_OFF:
        return "cut off"
    if known.get("answered_share") == 0:
        return "no answer"
    if "group_errors" in known:  # The rewards are those of reward.group_function.
        return "no mixed group"
    if known.get("all_right_share") == 0:
        return "none right"
    return "all right" if known.get("all_right_share") == 1 else "no mixed group"


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
