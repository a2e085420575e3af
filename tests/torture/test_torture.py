"""A short part of `make torture`, by a seed that is always the same."""

from __future__ import annotations

import pytest
from torture import files, kills, launching, layout_chain, leaks
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
    place.prepare()
    with launching.adopting():
        for what, where, at, lasting in (
            ("SIGKILL a rank", "latest: write", 1, False),
            ("ENOSPC", "checkpoints: write", 2, True),
        ):
            told = {"rank": 0, "where": where, "at": at, "lasting": lasting}
            found = kills.trial(place, what, kills.STAGES[1], told)
            assert not found.problem, found
            assert found.end == ("one line" if lasting else "killed")

    # What would have been found.
    directory = tmp_path / "plain" / "hurt"
    for name, file in (("figures", "metrics.jsonl"), ("rollout log", "rollouts.jsonl")):
        sound = (directory / file).read_text()
        (directory / file).write_text(sound.replace('"step": 2', '"step": 3'))
        assert place.expected.against(directory, what, "", exact=True) == f"other {name}"
        (directory / file).write_text(sound)
    (directory / "rollouts" / ".x.writing").touch()
    assert "left behind" in place.expected.against(directory, "SIGKILL a rank", "", exact=True)


@pytest.mark.full
def test_a_run_goes_on_in_other_layouts(tmp_path):
    chains = layout_chain.Chains(tmp_path)
    legs = [layout_chain.LEGS[i] for i in (0, 1, 3)]
    told = [{"rank": 1, "where": "phase: update", "at": 1}, {}, {"rank": 0, "where": "checkpoints: write", "at": 3}]
    directory, killed = chains.run(legs, told)
    assert killed == 2
    assert layout_chain.differs(chains.whole(3), directory) == ""


def test_what_grows_is_seen():
    """From the second fifth of the steps to the last: 1% of memory may come, one open file may not."""

    def seen(mib, files):
        return [leaks.Held(mib(i), 50.0, 2, files(i), 9, 1, 1.0, 5, 8.0) for i in range(100)]

    grown = leaks.growth(seen(lambda i: 100 + max(i - 20, 0) / 70, lambda i: 20 + i % 5))
    assert grown["trainer_mib"] == pytest.approx((69.5 - 9.5) / 70 / (100 + 9.5 / 70))
    assert leaks.too_much(grown) == []
    grown = leaks.growth(seen(lambda i: 100 + i / 10, lambda i: 20 + i // 90))
    assert leaks.too_much(grown) == ["trainer_mib", "files"]
