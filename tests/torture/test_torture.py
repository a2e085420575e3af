"""A short part of `make torture`, by a seed that is always the same."""

from __future__ import annotations

import json

import pytest
from torture import files, kills
from torture.configs import config_target
from torture.fuzz import fuzz

from megatron_brorl.errors import UserError

TARGETS = {"config": config_target, **files.file_targets()}
CASES = {"config": 300, "tokenizer.json": 10}  # the latter tries chat templates in processes


@pytest.mark.parametrize("name", TARGETS)
def test_spoiled_input_is_accepted_or_refused_in_one_line(name):
    counts, failures = fuzz(name, TARGETS[name], range(CASES.get(name, 25)), seed=1)
    assert not failures, failures[0]
    assert counts["accepted"]  # what is refused for another reason than what was spoiled tests nothing


def test_what_the_fuzzer_takes_for_a_failure(tmp_path):
    def fails(error):
        def target(folder, rng):
            def exercise():
                raise error

            return exercise

        return fuzz("planted", target, range(1), seed=0)[0]

    assert fails(KeyError("x")) == {"traceback": 1}
    assert fails(UserError("two\nlines")) == {"refused": 1}  # made one by UserError itself
    broken = UserError("one")
    broken.args = ("two\nlines",)
    assert fails(broken) == {"several lines": 1}


@pytest.mark.slow
def test_hurt_runs_end_as_the_others(tmp_path):
    place = kills.arena(tmp_path)
    assert place.run(tmp_path / "whole").returncode == 0
    expected = kills.outcome(tmp_path / "whole")
    last = kills._events(place, 0)
    for at, what in ((last // 2, "SIGKILL"), (last - 3, "ENOSPC"), (last // 3, "EIO")):
        first, problem = kills.trial(place, {"rank": 0, "at": at, "do": what}, expected)
        assert not problem, (at, what, first)
        assert not first.startswith("exit"), first
    assert json.loads((tmp_path / "hurt" / "summary.json").read_text())["steps"] == 4
