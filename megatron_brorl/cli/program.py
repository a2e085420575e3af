"""What a Python program adds to a command that it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_brorl.rewards import custom
from megatron_brorl.train.callbacks import Callbacks


@dataclass(frozen=True)
class Program:
    """What a Python program adds to a command that it runs (face/training.py)."""

    reward: custom.OwnReward | None = None  # judges rows whose verifier is custom.IN_PROCESS
    callbacks: Callbacks = field(default_factory=Callbacks)
    goes_on: bool = False  # after an error, so that what the command holds must be given back
    told: Callable[[str, str], None] = lambda name, value: None  # what was looked at and found well, as it is


NOTHING = Program()  # of the command line
