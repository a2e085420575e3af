"""The environment of benchmarks/bench_turns.py. Workers import it, so it imports no torch."""

from __future__ import annotations

import random
import time
from typing import Any


class Sleeper:
    """An episode whose turns are answered after a random time of 0 to row["metadata"]["seconds"]."""

    def reset(self, row: dict[str, Any]) -> None:
        self._seconds = row["metadata"]["seconds"]
        self._turns = row["metadata"]["turns"]

    def step(self, text: str) -> tuple[str, bool]:
        time.sleep(random.uniform(0, self._seconds))
        self._turns -= 1
        return "ok", not self._turns

    def reward(self) -> float:
        return 0.0
