"""What counts as enough rollouts. A file of its own, so that the command line can show the defaults without torch."""

from __future__ import annotations

from dataclasses import dataclass

CANDIDATES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Targets:
    """N is enough where all three hold."""

    kept: float = 0.95  # of the share of prompts that the largest candidate keeps
    coupling: float = 0.1  # largest part of the coupling that may be left unsampled
    efficiency: float = 0.9  # of the best candidate's signal per time


TARGETS = Targets()
