"""A custom reward function: the prompt "7" asks for any two numbers that add up to 7."""

from __future__ import annotations

import re
from typing import Any


def score(response: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return reward 1 for a correct sum and 0.2 for a wrong sum, with form and correctness as parts."""
    sum_ = re.fullmatch(r"(\d{1,3})\+(\d{1,3})", response)
    if sum_ is None:
        return {"reward": 0.0, "reason": "not of the form a+b", "parts": {"form": 0.0, "right": 0.0}}
    if int(sum_[1]) + int(sum_[2]) != row["metadata"]["sum"]:
        return {"reward": 0.2, "reason": f"not {row['metadata']['sum']}", "parts": {"form": 1.0, "right": 0.0}}
    return {"reward": 1.0, "parts": {"form": 1.0, "right": 1.0}}


score.pure = True  # type: ignore[attr-defined]  # equal responses to a row are scored once
