"""Evaluations that bring nothing new: what ends a run, and what resets the reference policy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Stall:
    """Counts evaluations in a row that are not above the best one."""

    best: float | None = None
    count: int = 0

    def record(self, score: float) -> None:
        """Count one more evaluation, whose pass@1 is `score`."""
        better = self.best is None or score > self.best
        self.best, self.count = (score, 0) if better else (self.best, self.count + 1)
