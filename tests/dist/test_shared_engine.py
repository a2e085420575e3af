"""Ranks that share an engine: its workers use the GPUs of all ranks, and only its leader calls it."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


def test_no_rank_loads_its_models_before_the_engine_is_asleep(worlds, tmp_path):
    expected = ["engine asleep", "other loads its models"]
    assert worlds(2).run("engine_jobs:sleeping", str(tmp_path), "sleep") == [expected] * 2


def test_the_engine_takes_no_memory_before_every_rank_has_offloaded(worlds, tmp_path):
    expected = ["other has offloaded", "engine awake", "leader goes on"]
    assert worlds(2).run("engine_jobs:waking", str(tmp_path), "wake") == [expected] * 2


def test_no_rank_continues_before_the_engine_has_its_weights(worlds):
    assert worlds(2).run("engine_jobs:updating", "update") == [["engine has loaded", "other goes on"]] * 2


@pytest.mark.parametrize(("which", "expected"), [(0, []), (1, ["engine asleep", "engine awake"])])
def test_a_stuck_rank_blocks_no_other_rank(which, expected, worlds, tmp_path):
    assert worlds(2).run("engine_jobs:stuck", str(tmp_path), f"stuck {which}", which) == [expected] * 2


def test_each_engine_has_a_barrier_of_its_own(worlds, tmp_path):
    expected = ["first engine's ranks met", "second engine's ranks met"]
    assert worlds(4).run("engine_jobs:groups", str(tmp_path), "groups") == [expected] * 4
