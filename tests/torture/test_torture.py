"""Two trials of `make torture`."""

from __future__ import annotations

import pytest
from torture import faults
from torture.trials import RESUMED, Torture


@pytest.mark.slow
def test_a_killed_run_and_a_full_disk_end_as_the_undisturbed_run(tmp_path):
    torture = Torture(tmp_path)
    torture.prepare()
    for fault, operation, number, expected in (
        (faults.KILL, "latest: write", 1, "killed"),
        ("ENOSPC", "checkpoints: write", 2, "one line"),
    ):
        due = {"rank": 0, "operation": operation, "number": number, "fault": fault, "lasting": fault != faults.KILL}
        assert torture.trial(RESUMED, due) == (expected, "")
