"""The cause that is reported if no group has a signal."""

import math

import pytest

from megatron_brorl.algo.advice import why_no_signal

FINE = {"kept_share": 0.5, "cut_off_share": 0.1, "answered_share": 0.8, "reward_std": 0.4, "all_right_share": 0.1}
SILENT = FINE | {"kept_share": 0.0}
NO_GROUP_ALL_RIGHT = {"all_right_share": 0.0}


@pytest.mark.parametrize(
    ("shares", "why"),
    [
        (FINE, None),
        (SILENT, "no mixed group"),
        (SILENT | {"all_right_share": 1.0}, "all right"),
        (SILENT | NO_GROUP_ALL_RIGHT | {"answered_share": 0.0}, "no answer"),
        (SILENT | NO_GROUP_ALL_RIGHT | {"answered_share": 0.0, "cut_off_share": 1.0}, "cut off"),
        (SILENT | NO_GROUP_ALL_RIGHT | {"cut_off_share": 0.91}, "cut off"),
        (SILENT | NO_GROUP_ALL_RIGHT | {"cut_off_share": 0.89}, "none right"),
        # Without dynamic sampling every group is kept, but equal rewards are no signal.
        (FINE | NO_GROUP_ALL_RIGHT | {"kept_share": 1.0, "reward_std": 0.0}, "none right"),
        # With partial credit, groups that are all wrong have a signal, and cut-off responses keep a part of it.
        (FINE | NO_GROUP_ALL_RIGHT | {"kept_share": 1.0}, None),
        (FINE | {"cut_off_share": 1.0}, None),
        (SILENT | NO_GROUP_ALL_RIGHT | {"teacher_kl": 0.5}, None),  # a signal for every token
        (dict.fromkeys(FINE, math.nan), None),  # Missing metrics explain nothing.
        (dict.fromkeys(FINE, None), None),
        ({}, None),
    ],
)
def test_the_first_cause_is_named(shares, why):
    assert why_no_signal(shares) == why
