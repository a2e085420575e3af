"""Run the cells of examples/python_api.ipynb in order and in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[3] / "examples" / "python_api.ipynb"


def test_the_notebook_runs_and_its_values_are_correct(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells)
    names = {}
    for i, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"cell {i}", "exec"), names)

    # Rewards of the siblings, computed directly.
    by_hand = [sum(c in "0123456789" for c in s.text.strip()) / max(len(s.text.strip()), 1) for s in names["siblings"]]
    assert len(by_hand) == 64
    assert [r.reward for r in names["rewards"]] == pytest.approx(by_hand)
    assert names["mean"] == pytest.approx(sum(by_hand) / 64)
    assert len(set(by_hand)) > 1

    # The callback received the recorded rewards of all rollouts.
    run = names["run"]
    assert run.finished
    assert names["curve"].rewards == [row["reward"] for row in names["record"].metrics]
    for step, mean in enumerate(names["curve"].rewards):
        rewards = run.rollouts(step)["reward"].to_pylist()
        assert len(rewards) == 4 * 64
        assert sum(rewards) / len(rewards) == pytest.approx(mean)

    # The plots show the same values.
    histogram, line = names["axes"]
    assert sum(bar.get_height() for bar in histogram.patches) == 64
    assert line.lines[0].get_ydata().tolist() == pytest.approx(names["curve"].rewards)
    names["plt"].close("all")
