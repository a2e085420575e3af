"""A step is begun only where one as long as the longest of the last five would end before the job."""

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


def test_the_longest_of_the_last_steps_must_fit(monkeypatch):
    monkeypatch.setenv(SLURM_END, "1100")
    clock = Clock()
    end = JobEnd(clock)
    assert end.step_fits()  # no step is known yet
    assert fits_after(end, clock, 10)  # 1010
    assert fits_after(end, clock, 30)  # 1040, an evaluation among it
    assert end.step_s() == 30
    assert fits_after(end, clock, 10)  # 1050
    assert fits_after(end, clock, 19)  # 1069 + 30 < 1100
    assert not fits_after(end, clock, 1)  # 1070 + 30 is not
    assert not fits_after(end, clock, 1)  # it is the last but four
    assert fits_after(end, clock, 1)  # 1072 + 19: it is looked back on no more
    assert end.step_s() == 19


def test_saving_must_fit_too(monkeypatch):
    """Where it went on beside the steps, which therefore do not show how long it takes."""
    monkeypatch.setenv(SLURM_END, "1100")
    clock = Clock()
    end = JobEnd(clock)
    assert end.step_fits(99.0)
    clock.now += 40
    assert end.step_fits(19.0)  # 1040 + 40 + 19
    assert not end.step_fits(60.0)


def test_without_an_end_every_step_fits(monkeypatch):
    monkeypatch.delenv(SLURM_END, raising=False)
    assert JobEnd(lambda: 9e9).step_fits()
    monkeypatch.setenv(SLURM_END, "1500")
    assert JobEnd(lambda: 1499.0).step_fits()
    assert not JobEnd(lambda: 1500.0).step_fits()


def test_a_time_that_is_none_is_told(monkeypatch):
    monkeypatch.setenv(SLURM_END, "UNLIMITED")
    with pytest.raises(UserError) as caught:
        JobEnd()
    assert str(caught.value) == "SLURM_JOB_END_TIME = UNLIMITED: must be a Unix time; unset it"
