"""How many prompts a round asks, by search and by chance."""

from __future__ import annotations

import math
import random

import pytest

from megatron_brorl.config.schema import RolloutConfig
from megatron_brorl.train.rounds import Taken, prompts_to_ask

CONFIG = RolloutConfig(prompts=128, refills=4)


@pytest.mark.parametrize("missing", [1, 2, 17, 128])
@pytest.mark.parametrize("kept", [1, 30, 62, 99, 100])
def test_the_fewest_prompts_with_three_standard_deviations_to_spare(missing, kept):
    p = kept / 100
    enough = [m for m in range(1, 513) if m * p - 3 * math.sqrt(m * p * (1 - p) * (1 + m / 100)) >= missing - 1e-9]
    assert prompts_to_ask(missing, Taken(asked=100, kept=kept), CONFIG) == (enough[0] if enough else 512)


def test_what_is_not_known_and_what_is_bounded():
    known = Taken(asked=100, kept=62)
    assert prompts_to_ask(128, Taken(), CONFIG) == 128
    assert prompts_to_ask(128, Taken(asked=10, kept=0), CONFIG) == 512
    assert prompts_to_ask(0, known, CONFIG) == prompts_to_ask(-3, known, CONFIG) == 1
    assert prompts_to_ask(3, known, RolloutConfig(prompts=128)) == 128


@pytest.mark.parametrize(("begin", "end"), [(0.62, 0.62), (0.62, 0.5), (0.35, 0.65)])
def test_one_extra_round_in_twenty_steps(begin, end):
    """Prompts kept with a probability that drifts: the first step knows nothing, and one round does in the others."""
    rounds, prompts, waited = [], [], []
    for seed in range(10):
        rng, taken, waiting = random.Random(seed), Taken(), 0
        for step in range(20):
            p, before, found = begin + (end - begin) * step / 19, taken, 0
            for _ in range(1 + CONFIG.refills):
                count = prompts_to_ask(128 - waiting - found, taken, CONFIG)
                found += sum(rng.random() < p for _ in range(count))
                taken = taken.with_round(count).with_share_of(before, found)
                if waiting + found >= 128:
                    break
            assert waiting + found >= 128
            waiting += found - 128
            waited.append(waiting)
        rounds.append(taken.rounds)
        prompts.append(taken.prompts * (begin + end) / 2 / (20 * 128))
    assert max(rounds) <= 21
    # What waits is made up for: no more prompts are asked than the groups trained on need, but for what waits at last.
    assert max(prompts) < 1.1
    assert max(waited) < 128
