"""The share of mixed groups against enumeration, and the command on a recorded run."""

import itertools
import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from command_line import output

from megatron_brorl.algo.pass_at_k import mixed_share
from megatron_brorl.rollout_log import FOLDER, GROUPS, LogEntry, write_groups


@pytest.mark.parametrize(
    "rewards", [[0] * 6, [1, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [1] * 6, [-3, -3, -3, 0, 0.5, 0.5]]
)
@pytest.mark.parametrize("n", [2, 3, 6])
def test_mixed_share_is_the_share_of_mixed_subsets(rewards, n):
    expected = np.mean([len(set(s)) > 1 for s in itertools.combinations(rewards, n)])
    assert mixed_share([[*Counter(rewards).values()]], n) == pytest.approx(expected, abs=1e-12)


def test_mixed_share_beyond_the_rollouts_is_that_of_all_rollouts():
    assert mixed_share([[1, 3], [4, 0], [4]], 8) == pytest.approx(1 / 3)


def test_command_reads_an_evaluation(tmp_path, capsys):
    common = {"benchmark": "own", "task": "t", "samples": 4, "reward": -0.75, "tokens": 1}
    rows = [common | {"id": 0, "right": 0, "reward_counts": [3, 1]}, common | {"id": 2, "right": 2}]
    (tmp_path / "evaluation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = output(capsys, "pass-rates", tmp_path)
    assert "2 prompts, the last evaluation of each, 4 to 4 rollouts" in out
    assert "mean 0.250" in out  # (0/4 + 2/4) / 2
    assert "mean reward -0.75;" in out
    assert "at least 100.0%" in out  # No response to the first prompt is right, but their rewards differ.


def test_command_counts_each_prompt_once_with_its_last_group(tmp_path, capsys):
    for step, right in enumerate(([0, 1], [2, 4])):
        rows = [{"group": i, "prompt_id": f"p{i}", "rollouts": 4, "right": r} for i, r in enumerate(right)]
        write_groups(tmp_path / FOLDER, LogEntry("step", step), pa.Table.from_pylist(rows, schema=GROUPS))
    out = output(capsys, "pass-rates", tmp_path)
    assert "2 prompts" in out
    assert "mean 0.750" in out  # (2/4 + 4/4) / 2
    assert "at least 50.0%" in out  # N = 8: the last group of p0 is mixed, that of p1 is not
    assert (tmp_path / "pass_rates.png").stat().st_size > 1000
