"""Why rollouts carry no signal, from the shares that a step or a whole run records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Why = Literal["cut off", "no answer", "none right", "all right", "no mixed group"]

FIGURES = ("kept_share", "reward_std", "cut_off_share", "answered_share", "all_right_share")
MOST_CUT_OFF = 0.9  # share of the responses from which on the others cannot be what is wrong


def why_no_signal(shares: Mapping[str, float | None]) -> Why | None:
    """The first of the causes that explains that no group has a signal; None where one has, or nothing is known.

    shares: the metrics FIGURES of a step, or their means over steps. A later cause follows from an earlier one: what is
    cut off has no answer, what has none is not right.
    """
    known = {name: value for name, value in shares.items() if value is not None and value == value}  # NaN is unknown
    # Without dynamic sampling every group is kept, whatever its rewards are.
    if known.get("kept_share") != 0 and known.get("reward_std") != 0:
        return None
    if known.get("cut_off_share", 0.0) >= MOST_CUT_OFF:
        return "cut off"
    if known.get("answered_share") == 0:
        return "no answer"
    if known.get("all_right_share") == 0:
        return "none right"
    return "all right" if known.get("all_right_share") == 1 else "no mixed group"
