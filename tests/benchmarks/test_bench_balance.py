"""The arithmetic of the balance benchmark by hand, and a lower bound on the balance of training."""

from __future__ import annotations

import json
import sys
from collections import Counter

import bench_balance as simulation
import numpy as np
import pytest

from megatron_brorl.config.schema import AlgoConfig
from megatron_brorl.parallel.balance import CostModel


def test_efficiency():
    assert simulation.efficiency(np.array([1, 2, 3])) == pytest.approx(2 / 3)
    assert simulation.efficiency(np.array([[1, 3], [2, 2]])) == pytest.approx(4 / 5)


def test_lengths_and_kept_groups():
    outcomes = simulation.drawn(512, seed=1)
    assert len(outcomes.kept) == 79  # 62% of 128
    assert outcomes.tokens.max() == simulation.LONGEST
    logs = outcomes.tokens.double().log()
    uncut = logs[outcomes.tokens.double().median(1).values < 4000]
    assert float(uncut.std(1).mean()) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("of", ["prompts", "siblings"])
def test_the_efficiency_of_runs_by_hand(of):
    """All rows are equal: each of 64 replicas has two prompts, of which only some are in an optimizer step."""
    outcomes = simulation.drawn(16, seed=2)
    outcomes.tokens.fill_(1000)
    holder = simulation.in_runs(outcomes, 64)
    assert holder[6].tolist() == [3] * 16
    steps = [Counter() for _ in range(8)]
    for place, group in enumerate(outcomes.kept):
        for sibling in range(16):
            steps[(place if of == "prompts" else sibling) % 8][group // 2] += 1
    expected = sum(step.total() / 64 for step in steps) / sum(max(step.values()) for step in steps)
    algo = AlgoConfig(mini_batches=8, mini_batch_of=of)
    efficiency = simulation.old_update(outcomes, holder, algo, CostModel(1e-4, 10**6, False), 64)
    assert efficiency == pytest.approx(expected)


def test_the_quick_table(monkeypatch, tmp_path):
    out = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["bench_balance.py", "--quick", "--json", str(out)])
    simulation.main()
    table = json.loads(out.read_text())
    for row in table:
        assert row["rows"] == 79 * 64
        assert row["update"] >= 0.98 > 0.9 > row["update_runs"]
        assert row["generation"] >= 0.95 > row["generation_runs"]
    assert len(table) == 2
