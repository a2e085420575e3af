"""Tests of JobEnd: a step starts only if one as long as the longest of the last five would end before the job."""

from __future__ import annotations

import pytest

from megatron_brorl.cli.session import SLURM_END, JobEnd
from megatron_brorl.errors import UserError


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def fits_after(end: JobEnd, clock: Clock, seconds: float) -> bool:
    clock.now += seconds
    return end.step_fits()


def test_a_step_as_long_as_the_longest_recent_one_must_fit(monkeypatch):
    monkeypatch.setenv(SLURM_END, "1100")
    clock = Clock()
    end = JobEnd(clock)
    assert end.step_fits()  # no step has been timed yet
    assert fits_after(end, clock, 10)  # 1010
    assert fits_after(end, clock, 30)  # 1040, the step includes an evaluation
    assert end.step_s() == 30
    assert fits_after(end, clock, 10)  # 1050
    assert fits_after(end, clock, 19)  # 1069 + 30 < 1100
    assert not fits_after(end, clock, 1)  # 1070 + 30 = 1100
    assert not fits_after(end, clock, 1)  # the step of 30 s is still among the last five
    assert fits_after(end, clock, 1)  # 1072 + 19; the step of 30 s no longer counts
    assert end.step_s() == 19


def test_time_for_saving_is_included(monkeypatch):
    """Steps do not include the time of saving in the background, so it is passed to step_fits."""
    monkeypatch.setenv(SLURM_END, "1100")
    clock = Clock()
    end = JobEnd(clock)
    assert end.step_fits(99.0)
    clock.now += 40
    assert end.step_fits(19.0)  # 1040 + 40 + 19
    assert not end.step_fits(60.0)


def test_without_a_job_end_every_step_fits(monkeypatch):
    monkeypatch.delenv(SLURM_END, raising=False)
    assert JobEnd(lambda: 9e9).step_fits()
    monkeypatch.setenv(SLURM_END, "1500")
    assert JobEnd(lambda: 1499.0).step_fits()
    assert not JobEnd(lambda: 1500.0).step_fits()


def test_an_invalid_job_end_is_refused(monkeypatch):
    monkeypatch.setenv(SLURM_END, "UNLIMITED")
    with pytest.raises(UserError) as caught:
        JobEnd()
    assert str(caught.value) == "SLURM_JOB_END_TIME = UNLIMITED: must be a Unix time; unset it"
