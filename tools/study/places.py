"""Where a study keeps what belongs to a warm start or a run. Imports nothing heavy: who starts others reads it too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

UNSEEN = "unseen"  # prompts that no run trains on


@dataclass(frozen=True)
class Place:
    """The files of one warm start."""

    folder: Path

    @property
    def model(self) -> Path:
        """The Hugging Face directory that runs begin with."""
        return self.folder / "warm" / "model"

    def prompts(self, name: str) -> Path:
        """Of a bin, or UNSEEN."""
        return self.folder / f"{name}.jsonl"

    @property
    def start(self) -> Path:
        """How the warm start answers them, by bin and prompt set; there when everything else is."""
        return self.folder / "start.json"


def place_of(directory: Path, seed: int) -> Place:
    """Where a warm start of this seed is."""
    return Place(directory / "warm_starts" / str(seed))


def work(directory: Path, run: str) -> Path:
    """A run's run.dir."""
    return directory / "work" / run
