"""What the pool says of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["ok", "timeout", "error", "broken", "invalid", "crash", "no_answer"]


@dataclass(frozen=True)
class Verdict:
    """The reward of one request; 0 unless the status is ok.

    timeout: took longer than the deadline. error: the verifier raised on the answer. broken: it raises on the prompt's
    reference answer too. invalid: it returned something other than a number in [0, 1]. crash: its process died, twice.
    no_answer: there was nothing to score.
    """

    reward: float
    status: Status
    reason: str = field(default="", compare=False)  # of error and broken: the exception's type and first line
    parts: Mapping[str, float] = field(default_factory=dict, compare=False)  # what the reward is made of
