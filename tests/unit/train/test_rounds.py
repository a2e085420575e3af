"""The number of prompts of a round, against a search and in simulation."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from megatron_brorl.config.schema import RolloutConfig
from megatron_brorl.train.collect import SourcePosition, round_size

CONFIG = RolloutConfig(prompts=128, refills=4)


@pytest.mark.parametrize("missing", [1, 2, 17, 128])
@pytest.mark.parametrize("kept", [1, 30, 62, 99, 100])
def test_round_size_is_the_smallest_number_that_satisfies_the_inequality(missing, kept):
    p = kept / 100
    enough = [m for m in range(1, 513) if m * p - 3 * math.sqrt(m * p * (1 - p) * (1 + m / 100)) >= missing - 1e-9]
    assert round_size(missing, SourcePosition(recent_prompts=100, recent_kept=kept), CONFIG) == (
        enough[0] if enough else 512
    )


def test_bounds_and_unknown_kept_share():
    known = SourcePosition(recent_prompts=100, recent_kept=62)
    assert round_size(128, SourcePosition(), CONFIG) == 128
    assert round_size(128, SourcePosition(recent_prompts=10, recent_kept=0), CONFIG) == 512
    assert round_size(0, known, CONFIG) == round_size(-3, known, CONFIG) == 1
    assert round_size(3, known, RolloutConfig(prompts=128)) == 128


@pytest.mark.parametrize(("begin", "end"), [(0.62, 0.62), (0.62, 0.5), (0.35, 0.65)])
def test_one_extra_round_in_twenty_steps(begin, end):
    """The kept share drifts. The first step does not know it; the others need one round."""
    rounds, prompts, waited = [], [], []
    for seed in range(10):
        rng = random.Random(seed)
        position = SourcePosition()
        waiting = 0
        for step in range(20):
            p = begin + (end - begin) * step / 19
            start = position
            found = 0
            for _ in range(1 + CONFIG.refills):
                count = round_size(128 - waiting - found, position, CONFIG)
                found += sum(rng.random() < p for _ in range(count))
                position = replace(position, rounds=position.rounds + 1, prompts_read=position.prompts_read + count)
                position = position.with_kept(start, found)
                if waiting + found >= 128:
                    break
            assert waiting + found >= 128
            waiting += found - 128
            waited.append(waiting)
        rounds.append(position.rounds)
        prompts.append(position.prompts_read * (begin + end) / 2 / (20 * 128))
    assert max(rounds) <= 21
    # Surplus groups reduce later rounds, so few more prompts are sampled than the trained groups need.
    assert max(prompts) < 1.1
    assert max(waited) < 128
