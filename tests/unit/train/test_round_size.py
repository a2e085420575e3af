"""The number of prompts of a round, against a search."""

from __future__ import annotations

import math

import pytest

from megatron_brorl.config.schema import RolloutConfig
from megatron_brorl.train.collect import SourcePosition, round_size

CONFIG = RolloutConfig(prompts=128, refills=4)


@pytest.mark.parametrize("missing", [1, 2, 17, 128])
@pytest.mark.parametrize("kept", [1, 30, 62, 99, 100])
def test_round_size_is_the_smallest_number_that_satisfies_the_inequality(missing, kept):
    """A round of m prompts keeps m p on average. Three standard deviations below, it still keeps `missing` prompts."""
    p = kept / 100
    enough = [m for m in range(1, 513) if m * p - 3 * math.sqrt(m * p * (1 - p) * (1 + m / 100)) >= missing - 1e-9]
    expected = enough[0] if enough else 512  # MAX_OVERSAMPLE * rollout.prompts
    assert round_size(missing, SourcePosition(recent_prompts=100, recent_kept=kept), CONFIG) == expected


def test_bounds_and_unknown_kept_share():
    position = SourcePosition(recent_prompts=100, recent_kept=62)
    assert round_size(128, SourcePosition(), CONFIG) == 128
    assert round_size(128, SourcePosition(recent_prompts=10, recent_kept=0), CONFIG) == 512
    assert round_size(0, position, CONFIG) == round_size(-3, position, CONFIG) == 1
    assert round_size(3, position, RolloutConfig(prompts=128)) == 128
