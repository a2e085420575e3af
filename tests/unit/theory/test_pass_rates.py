"""The share of mixed groups against enumeration, and the command on a recorded run."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pyarrow as pa
import pytest

from megatron_brorl.cli.main import main
from megatron_brorl.rollout_log import FOLDER, GROUPS, LogEntry, write_groups
from megatron_brorl.theory.pass_rates import mixed_share


@pytest.mark.parametrize("right", [0, 1, 3, 6])
@pytest.mark.parametrize("n", [2, 3, 6])
def test_mixed_share_is_the_share_of_mixed_subsets(right, n):
    rewards = [1] * right + [0] * (6 - right)
    subsets = list(itertools.combinations(rewards, n))
    expected = np.mean([0 < sum(s) < n for s in subsets])
    assert mixed_share(np.array([right]), np.array([6]), n) == pytest.approx(expected, abs=1e-12)


def test_mixed_share_beyond_the_rollouts_is_that_of_all_rollouts():
    assert mixed_share(np.array([1, 0, 4]), np.array([4, 4, 4]), 8) == pytest.approx(1 / 3)


@pytest.fixture
def printed(tmp_path, capsys):
    """Return a function that runs `brorl pass-rates tmp_path` and returns its output."""

    def run():
        with pytest.raises(SystemExit) as end:
            main(["pass-rates", str(tmp_path)])
        assert not end.value.code
        return capsys.readouterr().out

    return run


def test_command_reads_an_evaluation(tmp_path, printed):
    rows = [
        {"benchmark": "own", "id": i, "task": "t", "samples": 4, "right": i, "reward": 0, "tokens": 1} for i in (0, 2)
    ]
    (tmp_path / "evaluation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = printed()
    assert "2 prompts, the last evaluation of each, 4 to 4 rollouts" in out
    assert "mean 0.250" in out


def test_command_counts_each_prompt_once_with_its_last_group(tmp_path, printed):
    for step, right in enumerate(([0, 1], [2, 4])):
        rows = [{"group": i, "prompt_id": f"p{i}", "rollouts": 4, "right": r} for i, r in enumerate(right)]
        write_groups(tmp_path / FOLDER, LogEntry("step", step), pa.Table.from_pylist(rows, schema=GROUPS))
    out = printed()
    assert "2 prompts" in out
    assert "mean 0.750" in out
    assert "at least 50.0%" in out  # N = 8: the last group of p0 is mixed, that of p1 is not
    assert (tmp_path / "pass_rates.png").stat().st_size > 1000
