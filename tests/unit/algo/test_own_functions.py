"""Advantages and losses that users write: their arguments, and one line for every mistake."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
import torch

from megatron_brorl.algo.advantages import group_advantages
from megatron_brorl.cli import trial
from megatron_brorl.config.schema import AlgoConfig, Config, RolloutConfig
from megatron_brorl.errors import UserError

ROWS = [{"id": f"row{i}", "prompt": "2 + 2", "answer": "4", "metadata": {"level": i}} for i in range(3)]
MASK = torch.tensor([[True] * 4, [True, False, True, True], [True, True, True, False]])  # False: lost


def check(folder: Path, source: str, **names: str) -> dict[str, str]:
    """Write a file, check its functions as at the start of a run, and return hashes. names: advantage="f"."""
    (folder / "mine.py").write_text(source)
    values = {key: f"{folder / 'mine.py'}:{function}" for key, function in names.items()}
    config = Config(algo=AlgoConfig(**values), rollout=RolloutConfig(n=4))
    return trial.check_user_functions(config, ROWS, in_process={})


def test_an_advantage_receives_the_rows_and_lost_rollouts_have_none(tmp_path):
    source = """
import torch
def by_level(rewards, mask, rows):
    levels = torch.tensor([row["metadata"]["level"] for row in rows])
    return torch.where(mask, rewards * levels[:, None], float("nan"))
"""
    check(tmp_path, source, advantage="by_level")
    algo = AlgoConfig(advantage=f"{tmp_path / 'mine.py'}:by_level")
    assert group_advantages(torch.ones(3, 4), MASK, ROWS, algo).tolist() == [[0, 0, 0, 0], [1, 0, 1, 1], [2, 2, 2, 0]]


def test_a_run_takes_the_current_content_of_a_file(tmp_path):
    algo = AlgoConfig(advantage=f"{tmp_path / 'mine.py'}:f")
    for factor in (2, 3):
        source = f"def f(rewards, **_): return rewards * {factor}\n"
        hashes = check(tmp_path, source, advantage="f")
        assert hashes == {algo.advantage: hashlib.sha256(source.encode()).hexdigest()}
        assert group_advantages(torch.ones(1, 2), MASK[:1, :2], ROWS[:1], algo).tolist() == [[factor, factor]]


LOSS = "def f(log_probs, old_log_probs, advantages, mask, entropy, sequence):\n    "
ADVANTAGE = "def f(rewards, mask, rows):\n    "


@pytest.mark.parametrize(
    ("key", "source", "message"),
    [
        ("advantage", "", "'f'; add it, or name another"),
        ("advantage", "1 / 0", "ZeroDivisionError: division by zero (mine.py, line 1)"),
        ("advantage", "def f(rewards): return rewards", "(rewards, mask, rows)"),
        ("advantage", ADVANTAGE + "return rows[0]['level']", "KeyError: 'level' (mine.py, line 2)"),
        ("advantage", ADVANTAGE + "return rewards.tolist()", "a list, not a tensor [3, 4]"),
        ("advantage", ADVANTAGE + "return rewards.mean(1)", "torch.float64 [3], not floats [3, 4]"),
        ("advantage", ADVANTAGE + "return mask", "torch.bool [3, 4], not floats [3, 4]"),
        ("advantage", ADVANTAGE + "return 1 / rewards", "inf for rollout 0 of row 'row0'"),
        ("policy_loss", "def f(log_probs): return log_probs", "(log_probs, old_log_probs, advantages, "),
        ("policy_loss", LOSS + "return -log_probs.mean()", "torch.float32 [], not floats [6]"),
        ("policy_loss", LOSS + "return -advantages * log_probs.detach()", "without gradient"),
        ("policy_loss", LOSS + "return (log_probs + 1.5).log()", "nan for a token with log_probs -2, "),
        ("policy_loss", LOSS + "raise ValueError('two\\nlines')", "ValueError: two lines (mine.py, line 2)"),
    ],
)
def test_mistakes_are_one_line_that_names_file_and_function(tmp_path, key, source, message):
    with pytest.raises(UserError) as error:
        check(tmp_path, source, **{key: "f"})
    assert re.match(rf"algo\.{key} = {re.escape(str(tmp_path))}/mine\.py:f: ", str(error.value))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_one_line():
    with pytest.raises(UserError, match=r"^algo\.policy_loss = none\.py:f: no such file in /.*"):
        trial.check_user_functions(Config(algo=AlgoConfig(policy_loss="none.py:f")), ROWS, in_process={})
