"""What a verifier may return, made one form: a Score, a number, or a dict of reward, reason and parts.

A number is any object that converts to one float: bool, int, float, Fraction, Decimal, and the scalars and one-element
arrays of NumPy and torch. Texts are not numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from megatron_brorl.rewards.verifier import MOST_REWARD, Score

MOST_PARTS = 16
_MOST_NAME = 64  # characters of a part's name


class NoScore(Exception):
    """What came back is no score; says why."""


def score_of(returned: Any) -> Score:
    """The score that a verifier returned. Raises NoScore where it is none: only finite real numbers are rewards."""
    # The three forms.
    if isinstance(returned, Score):
        reward, reason, parts = returned
    elif isinstance(returned, dict):
        unknown = returned.keys() - {"reward", "reason", "parts"}
        if unknown or "reward" not in returned:
            raise NoScore(f"returned a dict with keys {_shown(sorted(map(str, returned)))}, not reward, reason, parts")
        reward, reason, parts = returned["reward"], returned.get("reason", ""), returned.get("parts", {})
    else:
        reward, reason, parts = returned, "", {}

    # Each as it must be; a missing reason is no reason to lose the reward.
    if not isinstance(reason, str):
        raise NoScore(f"returned the reason {_shown(reason)}, not a string")
    if not isinstance(parts, Mapping) or not all(isinstance(name, str) for name in parts):
        raise NoScore(f"returned the parts {_shown(parts)}, not a dict of numbers by name")
    if len(parts) > MOST_PARTS or any(len(name) > _MOST_NAME for name in parts):
        raise NoScore(f"returned more than {MOST_PARTS} parts, or one with a name of more than {_MOST_NAME} characters")
    numbers = {name: _number(value, f"for part {name!r}") for name, value in parts.items()}
    return Score(_number(reward, "for a reward"), reason, numbers)


def _number(value: Any, what: str) -> float:
    # Whatever a user's class raises here, it has not given a number.
    with contextlib.suppress(Exception):
        value = value.item() if hasattr(value, "item") else value
        # A text has no __float__, although float() would read one.
        if hasattr(type(value), "__float__") and abs(number := float(value)) <= MOST_REWARD:  # a NaN is not
            return number
    raise NoScore(f"returned {_shown(value)} {what}, not a finite number ({MOST_REWARD:g} at most)")


def _shown(value: Any) -> str:
    """Its repr, as far as a line has room; of plain types alone, because others bring code of their own."""
    if isinstance(value, (str, list)):
        value = value[:60]
    plain = value is None or type(value) in (bool, int, float, str, list)
    return repr(value)[:60] if plain else f"an object of type {type(value).__name__}"
