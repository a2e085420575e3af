"""The cause that is reported if no group has a signal."""

from __future__ import annotations

import math

import pytest

from megatron_brorl.algo.group_signal import why_no_signal

FINE = {"kept_share": 0.5, "cut_off_share": 0.1, "answered_share": 0.8, "reward_std": 0.4, "all_right_share": 0.1}
SILENT = FINE | {"kept_share": 0.0}
NONE_RIGHT = {"all_right_share": 0.0}


@pytest.mark.parametrize(
    ("shares", "why"),
    [
        (FINE, None),
        (FINE | {"kept_share": 1.0}, None),
        (SILENT, "no mixed group"),
        (SILENT | NONE_RIGHT, "none right"),
        (SILENT | {"all_right_share": 1.0}, "all right"),
        (SILENT | NONE_RIGHT | {"answered_share": 0.0}, "no answer"),
        (SILENT | NONE_RIGHT | {"answered_share": 0.0, "cut_off_share": 1.0}, "cut off"),
        (SILENT | NONE_RIGHT | {"cut_off_share": 0.97}, "cut off"),
        (SILENT | NONE_RIGHT | {"cut_off_share": 0.89}, "none right"),
        # Without dynamic sampling every group is kept, but equal rewards are no signal.
        (FINE | NONE_RIGHT | {"kept_share": 1.0, "reward_std": 0.0}, "none right"),
        (FINE | {"kept_share": 1.0, "reward_std": 0.0, "all_right_share": 1.0}, "all right"),
        # With partial credit, groups that are all wrong or all right have a signal.
        (FINE | NONE_RIGHT | {"kept_share": 1.0}, None),
        (FINE | {"kept_share": 1.0, "all_right_share": 1.0}, None),
        # A teacher is a signal for every token.
        (SILENT | NONE_RIGHT | {"teacher_kl": 0.5}, None),
        # Responses that are cut off may keep a part of their reward.
        (FINE | {"cut_off_share": 1.0}, None),
        # Missing metrics explain nothing.
        (dict.fromkeys(FINE, math.nan), None),
        (dict.fromkeys(FINE, None), None),
        ({}, None),
    ],
)
def test_the_first_cause_is_named(shares, why):
    assert why_no_signal(shares) == why
