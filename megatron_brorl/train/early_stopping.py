"""Count evaluations without improvement: for train.patience and for resetting the reference policy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class EarlyStopping:
    """Number of evaluations in a row that did not exceed the best score."""

    best: float | None = None
    count: int = 0

    def record(self, score: float) -> None:
        """Count an evaluation with this score."""
        if self.best is None or score > self.best:
            self.best = score
            self.count = 0
        else:
            self.count += 1
