"""The arithmetic of the balance benchmark by hand, and a lower bound on the balance of training."""

from __future__ import annotations

import json
import sys

import bench_balance as simulation
import numpy as np
import pytest


def test_efficiency():
    assert simulation.efficiency(np.array([1, 2, 3])) == pytest.approx(2 / 3)
    assert simulation.efficiency(np.array([[1, 3], [2, 2]])) == pytest.approx(4 / 5)


def test_lengths_and_kept_groups():
    outcomes = simulation.sample_outcomes(512, seed=1)
    assert len(outcomes.kept) == 79  # 62% of 128
    assert outcomes.tokens.max() == simulation.LONGEST
    logs = outcomes.tokens.double().log()
    uncut = logs[outcomes.tokens.double().median(1).values < 4000]
    assert float(uncut.std(1).mean()) == pytest.approx(0.5, abs=0.03)


def test_the_quick_table(monkeypatch, tmp_path):
    out = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["bench_balance.py", "--quick", "--json", str(out)])
    simulation.main()
    table = json.loads(out.read_text())
    for row in table:
        assert row["rows"] == 79 * 64
        assert row["update"] >= 0.98
        assert row["update_runs"] < 0.9
        assert row["generation"] >= 0.95
        assert row["generation_runs"] < 0.95
    assert len(table) == 2
