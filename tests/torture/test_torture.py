"""Tests of `make torture`: two trials succeed, and the comparison detects changed metrics and temporary files."""

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

    metrics = tmp_path / "run" / "metrics.jsonl"
    directory = tmp_path / "run"
    sound = metrics.read_text()
    metrics.write_text(sound.replace('"step": 2', '"step": 3'))
    assert torture.expected.difference(directory, "", disk_fault=True) == "other metrics"
    metrics.write_text(sound)
    (directory / "rollouts" / ".x.writing").touch()
    assert "left behind" in torture.expected.difference(directory, "", disk_fault=False)
