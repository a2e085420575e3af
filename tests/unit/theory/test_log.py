"""Rollout logs of any system, their mistakes in one line, and `brorl advise` from file to figure."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_brorl.cli.main import main
from megatron_brorl.errors import UserError
from megatron_brorl.rewards.extract import code
from megatron_brorl.theory.diagnostics import known_mass
from megatron_brorl.theory.log import log_row, read_log


def _write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n")
    return path


def test_both_forms_say_the_same(tmp_path):
    single = [
        {"prompt_id": 7, "answer": a, "reward": r, "tokens": t, "step": 3, "model": "x"}
        for a, r, t in (("42", True, 10), ("41", False, 12), ("42", 1, 9))
    ]
    other = [{"prompt_id": "b", "reward": 0.5}, {"prompt_id": "b", "reward": -1}]
    one = read_log(_write(tmp_path / "a", single[0], other[0], *single[1:], "", other[1]))
    group = {"prompt_id": "7", "step": 3, "answers": ["42", "41", "42"], "rewards": [1, 0, 1], "lengths": [10, 12, 9]}
    two = read_log(_write(tmp_path / "b", group, {"prompt_id": "b", "rewards": [0.5, -1]}))
    for a, b in zip(one, two, strict=True):
        assert (a.prompt_id, a.step, a.n) == (b.prompt_id, b.step, b.n)
        for field in ("rewards", "outcomes", "tokens", "log_probs", "responses"):
            x, y = getattr(a, field), getattr(b, field)
            assert (x is None and y is None) or x.tolist() == y.tolist()
    assert one[0].outcomes.tolist() == [0, 1, 0]
    assert one[0].tokens.tolist() == [10, 12, 9]
    assert one[1].outcomes is None


def test_token_ids_and_log_probs(tmp_path):
    rows = [
        {"prompt_id": "p", "token_ids": [5, 1], "log_probs": [-0.5, -0.25], "reward": 1},
        {"prompt_id": "p", "token_ids": [6, 1], "log_probs": [-1.0, -1.0], "reward": 0},
        {"prompt_id": "p", "token_ids": [5, 1], "log_probs": [-0.5, -0.25], "reward": 1},
    ]
    (g,) = read_log(_write(tmp_path / "log", *rows))
    assert g.outcomes.tolist() == g.responses.tolist() == [0, 1, 0]
    assert g.tokens.tolist() == [2, 2, 2]
    known = known_mass(g.responses, g.log_probs, g.rewards >= 1)
    assert known.p_pos == pytest.approx(np.exp(-0.75))
    assert known.unsampled_mass == pytest.approx(1 - np.exp(-0.75) - np.exp(-2.0))


def test_rows_of_this_trainer_come_back(tmp_path):
    codes = np.array([code(a) for a in ("6", "5", None, "6")])
    row = log_row("gcd/3", 9, np.array([1.0, 0, 0, 1]), codes, np.array([2, 3, 8, 2]))
    (g,) = read_log(_write(tmp_path / "a", row))
    assert (g.prompt_id, g.step, g.rewards.tolist()) == ("gcd/3", 9, [1, 0, 0, 1])
    assert g.outcomes.tolist() == [0, 1, 2, 0]
    assert g.tokens.tolist() == [2, 3, 8, 2]


GOOD = [{"prompt_id": p, "reward": r, "answer": str(r)} for p in "ab" for r in (0, 1, 1, 0, 1, 1)]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt_id": "a", "answer": "1"}, 'log.jsonl:13: no "reward"'),
        ({"reward": 1, "answer": "1"}, 'log.jsonl:13: no "prompt_id"'),
        ({"prompt_id": "a", "reward": "good"}, "\"reward\" must be a finite number, not 'good'"),
        ('{"prompt_id": "a", "reward": NaN}', '"reward" must be a finite number'),
        ({"prompt_id": ["a"], "reward": 1}, '"prompt_id" must be a string'),
        ({"prompt_id": "c", "rewards": []}, "log.jsonl:13: an empty group"),
        ({"prompt_id": "c", "rewards": [1, 0], "answers": ["1"]}, '1 "answers" for 2 "rewards"'),
        ({"prompt_id": "c", "rewards": 1}, '"rewards" must be a list'),
        ({"prompt_id": "c", "reward": 1}, "prompt 'c' has a single rollout"),
        ({"prompt_id": "a", "reward": 1}, "prompt 'a': some of its rollouts have an answer or token_ids and some do"),
        ({"prompt_id": "a", "reward": 1, "token_ids": [1]}, "prompt 'a': some of its rollouts have token_ids and some"),
        ({"prompt_id": "a", "reward": 1, "token_ids": [1.5]}, '"token_ids" must be a list of integers'),
        ({"prompt_id": "a", "reward": 1, "token_ids": [1], "log_probs": [-1, -2]}, '"log_probs" must be a list with'),
        ({"prompt_id": "a", "reward": 1, "answer": 3}, '"answer" must be a string'),
        ({"prompt_id": "a", "reward": 1, "step": "x"}, '"step" must be an integer'),
        ("{", "log.jsonl:13: not JSON"),
        ("[]", "log.jsonl:13: a row must be a JSON object"),
    ],
)
def test_mistakes_name_the_row(row, says, tmp_path, capsys):
    log = _write(tmp_path / "log.jsonl", *GOOD, row)
    assert _advise(log, "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert says in error
    assert not (tmp_path / "out").exists()


def _advise(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        main(["advise", *map(str, arguments)])
    return int(end.value.code or 0)


@pytest.mark.parametrize(
    ("rows", "options", "says"),
    [
        (GOOD[:6], [], "the log holds one prompt"),
        ([], [], "holds no rollouts"),
        (GOOD, ["--right", "2"], "no rollout of the log has a reward of at least 2"),
        (GOOD, ["--train", "1"], "--train needs --decode too"),
        (GOOD, ["--decode", "0"], "--decode not 0"),
        (GOOD, ["--n", "1"], "--n 1: a group baseline needs at least 2"),
        (GOOD, ["--resamples", "3"], "--resamples 3"),
        (GOOD, ["--prompts", "0"], "--prompts 0"),
        (GOOD, ["--tokens", "1000"], "--tokens needs the length of every rollout"),
        (GOOD, ["--budget", "0"], "--budget 0: must be above 0"),
        (GOOD, ["--run", "nowhere"], "no such file"),
    ],
)
def test_mistakes_of_the_command(rows, options, says, tmp_path, capsys):
    log = _write(tmp_path / "log.jsonl", *rows)
    assert _advise(log, "--out", tmp_path / "out", *options) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert says in error


def test_a_missing_log(tmp_path):
    with pytest.raises(UserError, match=r"nowhere: no such rollout log; .*theory\.log_rollouts = true"):
        read_log(tmp_path / "nowhere")


def test_advise_from_a_log(tmp_path, capsys):
    rng = np.random.default_rng(0)
    rows = []
    for i in range(30):
        right = rng.random(24) < rng.beta(0.5, 0.5)
        answers = ["r" if x else f"w{rng.integers(5)}" for x in right]
        lengths = rng.integers(20, 90, size=24).tolist()
        rows.append({"prompt_id": i, "rewards": right.astype(int).tolist(), "answers": answers, "lengths": lengths})
    log = _write(tmp_path / "log.jsonl", *rows)
    # As in the folder of a run that measured the noise.
    noise = {"theory_estimate/between": 1.0, "theory_estimate/within": 40.0}
    _write(tmp_path / "metrics.jsonl", *({"step": i, **noise} for i in range(3)))
    out = tmp_path / "out"
    options = ["--resamples", 40, "--n", 8, 16, 32, "--decode", 0.1, "--prefill", 1, "--tokens", 30_000]
    assert _advise(log, "--out", out, *options) == 0
    text = capsys.readouterr().out
    found = json.loads((out / "advice.json").read_text())
    assert [c["n"] for c in found["candidates"]] == [8, 16, 32]
    assert found["costs"]["prefill"] == 1
    # Three equal steps; nothing trains here, so that a prompt costs 1 + N / 10.
    both = found["together"]
    assert both["budget"] == pytest.approx(30 * (1 + 2.4))
    choices = {(int(102 / (1 + n / 10) + 1e-9), n): n for n in range(2, 33)}
    assert (both["prompts"], both["n"]) == min(choices, key=lambda c: (1 + 40 / (c[1] - 1)) / c[0])
    assert (both["n_low"], both["n_high"], both["pilot"]) == (both["n"], both["n"], [30, 24])
    assert f"together {both['prompts']} prompts of N = {both['n']} " in text
    assert f"{found['candidates'][1]['kept']['mean']:.1%}" in text
    assert (out / "advice.png").read_bytes().startswith(b"\x89PNG")
    singles = np.mean([sum(r["answers"].count(a) == 1 for a in set(r["answers"])) for r in rows])
    assert found["outcomes"]["singletons"] == pytest.approx(singles)
    assert found["outcomes"]["unseen_mass"] == pytest.approx(singles / 24)
    plan = found["allocation"]
    spent = sum(p["n"] * np.mean(r["lengths"]) for p, r in zip(plan["rollouts"], rows, strict=True))
    assert spent == pytest.approx(plan["tokens"])
    assert spent <= 30_000
    assert plan["value"] >= plan["uniform_value"]


def test_rewards_of_float32_are_logged_as_what_they_were():
    """A threshold of 0.9 finds a reward of 0.9, which is 0.8999999761581421 as float64."""
    rewards = np.array([0.9, -0.1, 1e-30], dtype=np.float32)
    row = log_row("a", 0, rewards, np.zeros(3, np.int64), np.ones(3, np.int64))
    assert row["rewards"] == [0.9, -0.1, 1e-30]
