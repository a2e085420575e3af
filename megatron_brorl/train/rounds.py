"""How many prompts a round asks: so many that it most likely keeps the groups that the step still needs.

Of m prompts, each kept with probability p, m p are kept in the mean. They miss it by a standard deviation of
sqrt(m p (1 - p) (1 + m / a)), for p itself is a share of only a prompts that were asked before. The smallest m that
leaves SURE such deviations to spare makes a second round the exception; what is kept beyond the target waits for the
next step, which then asks for so much less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megatron_brorl.config.schema import RolloutConfig

SURE = 3.0  # standard deviations, which chance falls short of once in 740 rounds
MAX_OVERSAMPLE = 4  # prompts of a round, at most, in units of rollout.prompts
FORGET = 0.5  # what a step has found counts so much per step that follows it: as much as two steps together


@dataclass(frozen=True)
class Taken:
    """What was taken from the source so far, and what share of it was kept lately; the same on every rank."""

    rounds: int = 0  # their numbers name random streams
    prompts: int = 0  # the place in the source's stream
    asked: float = 0.0  # prompts of late, those of earlier steps weighted by FORGET
    kept: float = 0.0  # of these

    def with_round(self, prompts: int) -> Taken:
        """After one more round."""
        return replace(self, rounds=self.rounds + 1, prompts=self.prompts + prompts)

    def with_share_of(self, before: Taken, kept: int) -> Taken:
        """With what the step so far has found; before: at its beginning, kept: groups of the prompts since then."""
        asked = FORGET * before.asked + (self.prompts - before.prompts)
        return replace(self, asked=asked, kept=FORGET * before.kept + kept)


def prompts_to_ask(missing: int, taken: Taken, config: RolloutConfig) -> int:
    """How many prompts the next round asks for `missing` more kept groups.

    rollout.prompts without refills, or if nothing is known yet. Otherwise the least m with
    m p - SURE sqrt(m p (1 - p) (1 + m / a)) >= missing, which squared is quadratic in m, within 1 and
    MAX_OVERSAMPLE x rollout.prompts.
    """
    if not config.refills or not taken.asked:
        return config.prompts
    most = MAX_OVERSAMPLE * config.prompts
    if missing <= 0:
        return 1  # what waits is enough: a step still looks at something new, so that the share is of its policy

    # (m p - missing)^2 = SURE^2 p (1 - p) (m + m^2 / a), the larger root.
    p = min(taken.kept / taken.asked, 1.0)
    spread = SURE**2 * p * (1 - p)
    square, linear = p**2 - spread / taken.asked, 2 * p * missing + spread
    if square <= 0:
        return most  # too few were kept to be sure with any number
    m = (linear + math.sqrt(max(linear**2 - 4 * square * missing**2, 0.0))) / (2 * square)
    return min(math.ceil(m - 1e-9), most)  # 1e-9: where p is 1, rounding must not ask for one more
