"""Tests of JobEnd: a step starts only if one as long as the longest of the last five would end before the job."""

from __future__ import annotations

import pytest

from megatron_brorl.cli.session import SLURM_END, JobEnd
from megatron_brorl.errors import UserError


def job(monkeypatch, times, ends="1100"):
    """Return the end of a job whose clock shows these times."""
    monkeypatch.setenv(SLURM_END, ends)
    return JobEnd(iter(times).__next__)


def test_a_step_as_long_as_the_longest_recent_one_must_fit(monkeypatch):
    # The longest of the last five steps takes 30 s, so the next one fits at 1069 and does not at 1070. At 1072 the
    # last five steps exclude that one, and the longest takes 19 s.
    end = job(monkeypatch, [1000, 1010, 1040, 1050, 1069, 1070, 1071, 1072])
    assert [end.step_fits() for _ in range(8)] == [True, True, True, True, True, False, False, True]
    assert end.step_s() == 19


def test_time_for_saving_is_included(monkeypatch):
    """Steps do not include the time of saving in the background, so it is passed to step_fits."""
    end = job(monkeypatch, [1000, 1040, 1040])
    assert end.step_fits(99.0)
    assert end.step_fits(19.0)  # 1040 + 40 + 19
    assert not end.step_fits(60.0)


def test_a_job_without_an_end_and_one_that_ends_now(monkeypatch):
    assert job(monkeypatch, [9e9], ends="").step_fits()
    assert not job(monkeypatch, [1500], ends="1500").step_fits()
    with pytest.raises(UserError, match=r"^SLURM_JOB_END_TIME = UNLIMITED: .* unset it"):
        job(monkeypatch, [], ends="UNLIMITED")
