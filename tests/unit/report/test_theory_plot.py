"""The figure says what the record says."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megatron_brorl.report.theory import build_figure, plot_theory


def rows():
    made = []
    for step in range(3):
        row = {"step": step, "theory_exact/unsampled_mass": 0.1 + step}
        row |= {f"theory_good_turing/{k}": v + step for k, v in (("low", 0.2), ("unseen_mass", 0.3), ("high", 0.4))}
        for h in (2, 4, 16):
            row |= {
                f"theory_hold_out/unsampled_mass_{h}": h / 100 + step,
                f"theory_hold_out/unsampled_mass_{h}_low": h / 200 + step,
                f"theory_hold_out/unsampled_mass_{h}_high": h / 50 + step,
            }
        made.append(row)
    return made


def test_drawn_is_what_is_written():
    mass, curve = build_figure(rows()).axes
    assert np.asarray(mass.lines[0].get_ydata()).tolist() == pytest.approx([0.3, 1.3, 2.3])
    assert np.asarray(mass.lines[1].get_ydata()).tolist() == pytest.approx([0.1, 1.1, 2.1])
    assert np.asarray(curve.lines[0].get_xdata()).tolist() == [2, 4, 16]
    assert np.asarray(curve.lines[0].get_ydata()).tolist() == pytest.approx([2.02, 2.04, 2.16])  # of the last step
    bars = [bar[:, 1].tolist() for bar in curve.containers[0].lines[2][0].get_segments()]
    assert bars == [pytest.approx([h / 200 + 2, h / 50 + 2]) for h in (2, 4, 16)]


def test_gaps_and_runs_without_diagnostics(tmp_path):
    assert all(axes.texts for axes in build_figure([{"step": 0}]).axes)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0, "reward": 1.0, "time": {}}) + "\n")
    assert plot_theory(tmp_path) is None
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    assert plot_theory(tmp_path).stat().st_size > 10_000
