"""Two trials of `make torture`."""

from __future__ import annotations

import pytest
from torture import faults
from torture.trials import RESUMED, Torture


@pytest.mark.slow
def test_a_killed_run_and_a_full_disk_end_as_the_undisturbed_run(tmp_path):
    torture = Torture(tmp_path)
    torture.prepare()
    for fault, where, at, expected in (
        (faults.KILL, "latest: write", 1, "killed"),
        ("ENOSPC", "checkpoints: write", 2, "one line"),
    ):
        settings = {"rank": 0, "where": where, "at": at, "fault": fault, "lasting": fault != faults.KILL}
        assert torture.trial(RESUMED, settings) == (expected, "")
