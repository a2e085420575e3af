"""The runs of a phase, in their order: blocks of one warm start and bin, in which the arms stand in random order.

What a machine does over the hours befalls all arms of a block alike, and a pair of arms is measured within minutes.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from study.design import Arm, Design

Phase = Literal["tune", "test", "plateau", "pilot"]


@dataclass(frozen=True)
class Run:
    """One training run, by what decides it."""

    phase: Phase
    arm: str
    bin: str
    warm_start: int  # its seed
    lr: float
    after: str = ""  # the run whose weights and optimizer it goes on from
    part: int = 0  # number of a continuation

    @property
    def name(self) -> str:
        """Of its files; different for different runs of a study."""
        rate = f"_lr{self.lr:g}" if self.phase == "tune" else ""
        part = f"_part{self.part}" if self.part else ""
        return f"{self.phase}_w{self.warm_start}_{self.bin}_{self.arm}{rate}{part}"


def tuning(design: Design) -> list[Run]:
    """Every arm with rates of its own at every one of them."""
    tuned = [arm for arm in design.arms if not arm.rate_of]
    return _blocks(
        design,
        "tune",
        [
            [Run("tune", arm.name, of, seed, arm.lr * factor) for arm in tuned for factor in design.tuning.factors]
            for seed in design.warm_starts.tune
            for of in design.tuning.bins
        ],
    )


def testing(design: Design, rates: Mapping[str, float]) -> list[Run]:
    """Every arm at its rate, on every warm start of the test and every bin that is its own; rates: by arm."""
    return _blocks(
        design,
        "test",
        [
            [
                Run("test", arm.name, of.name, seed, rate_of(arm, rates))
                for arm in design.arms
                if of.name in design.bins_of(arm)
            ]
            for seed in design.warm_starts.test
            for of in design.prompts.bins
        ],
    )


def pilots(design: Design, rates: Mapping[str, float]) -> list[Run]:
    """A pilot for every warm start of the test and bin, where the map asks the advisor; rates: by arm."""
    return [
        Run("pilot", asked.pilot, of.name, seed, rate_of(design.arm(asked.pilot), rates))
        for asked in design.maps
        if asked.pilot
        for seed in design.warm_starts.test
        for of in design.prompts.bins
    ]


def rate_of(arm: Arm, rates: Mapping[str, float]) -> float:
    """Its own, or that of the arm that it names."""
    return rates[arm.rate_of or arm.name]


def _blocks(design: Design, phase: Phase, blocks: Iterable[list[Run]]) -> list[Run]:
    # A phase's order does not depend on how many runs another has.
    generator = random.Random(f"{design.order_seed}:{phase}")
    shuffled = [generator.sample(block, len(block)) for block in blocks if block]
    return [run for block in generator.sample(shuffled, len(shuffled)) for run in block]
