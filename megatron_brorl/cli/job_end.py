"""The end of a job that a scheduler has set: a step that would not be done by then is not begun."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable

from megatron_brorl.errors import UserError

SLURM_END = "SLURM_JOB_END_TIME"  # Unix time, in the environment of a job's steps
_TURNS = 5  # that are looked back on: with their evaluations and checkpoints they are not equally long


class JobEnd:
    """Asked once between any two steps, so that it learns by itself how long they take."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """Raises UserError if the time in the environment is not a number."""
        said = os.environ.get(SLURM_END, "")
        try:
            self.at = float(said or 0)  # 0 = never
        except ValueError:
            raise UserError(f"{SLURM_END} = {said}: must be a Unix time; unset it") from None
        self._clock = clock
        self._turns: deque[float] = deque(maxlen=_TURNS)  # seconds, of the last ones
        self._asked: float | None = None

    def step_fits(self, save_s: float = 0.0) -> bool:
        """Whether as long a step as the longest of the last ones would be over before the job is.

        save_s: seconds that saving takes after it, where the turns so far do not show that.
        """
        now = self._clock()
        if self._asked is not None:
            self._turns.append(now - self._asked)
        self._asked = now
        return not self.at or now + self.step_s() + save_s < self.at

    def step_s(self) -> float:
        """Seconds of the longest of the last steps, with what came between them; 0 before the second one."""
        return max(self._turns, default=0.0)
