"""The checkpoint that was best in a held-out figure: `best` names it beside `latest`, and rotation leaves it alone.

    checkpoints/best      its name; on a second line the figure and its value: pass_at_1 0.6125

run.json of every checkpoint says the same of its time, so that a run that was killed between the two files finds what
it had; a run that goes on takes whichever is the better of both.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_brorl.checkpoints import folders
from megatron_brorl.checkpoints.folders import BEST

KEY = "best"  # of run.json: [step, figure, value] or null


@dataclass(frozen=True)
class Best:
    """A checkpoint, by its step, and what it was best in."""

    step: int
    figure: str  # as train.keep_best names it
    value: float

    def beats(self, other: Best | None) -> bool:
        """Whether it takes the other's place: above it, since a tie keeps the earlier one."""
        return not math.isnan(self.value) and (other is None or self.value > other.value)

    def as_json(self) -> list[Any]:
        """As run.json has it."""
        return [self.step, self.figure, self.value]


def write(root: Path, best: Best) -> None:
    """Let `best` name this checkpoint from now on. Raises OSError."""
    folders.point(root / BEST, f"{folders.name_of(best.step)}\n{best.figure} {best.value!r}")


def read(root: Path) -> Best | None:
    """What `best` says; None where it is not there, or says nothing that `write` has written."""
    with contextlib.suppress(OSError, ValueError):
        name, told = (root / BEST).read_text(encoding="utf-8").splitlines()
        step, (figure, value) = folders.step_of(name), told.split()
        if step is not None:
            return Best(step, figure, float(value))
    return None


def kept(root: Path, run: dict[str, Any], step: int, figure: str) -> Best | None:
    """What a run that goes on from `step` has to beat; None where nothing of that figure is kept.

    run: the run.json that it goes on from.
    """
    said = run.get(KEY)
    found = [read(root), Best(*said) if said else None]
    ours = [b for b in found if b and b.figure == figure and b.step <= step and folders.is_own(root, b.step)]
    return max(ours, key=lambda b: (b.value, -b.step), default=None)
