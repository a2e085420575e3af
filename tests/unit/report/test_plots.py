"""Tests that figures show the recorded values."""

from __future__ import annotations

import json
import math
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch

from megatron_brorl.errors import UserError
from megatron_brorl.report.content import RecordedRun, evaluations
from megatron_brorl.report.plots import curves_figure, plot_run
from megatron_brorl.tracking.metrics import MetricsWriter

REWARD, ACCURACY, LENGTH, KEPT, SECONDS, HEALTH = range(6)
BEFORE = {"mean": 0.153, "low": 0.13, "high": 0.18}
AFTER = {"mean": 0.637, "low": 0.6, "high": 0.67}
SUMMARY = {
    "before": {"pass_at_1": BEFORE, "mean_reward": BEFORE, "pass_at_k": {"1": 0.153, "4": 0.7, "8": 0.857}},
    "after": {"pass_at_1": AFTER, "mean_reward": AFTER, "pass_at_k": {"1": 0.637, "4": 0.72, "8": 0.77}},
    "held_out_prompts": 256,
    "rollouts_per_prompt": 512,
    "steps": 6,
    "job_seconds": 1326.0,
    "peak_rss_mib": 2100,
}


def make_rows(count: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for step in range(count):
        row = {"step": step, "reward": 0.1 + 0.01 * step, "kept_share": 0.5 + 0.001 * step, "loss": -0.01}
        row |= {"response_tokens": 30.0 + step, "grad_norm": 0.3 + 0.01 * step, "logprob_gap_max": 1e-6 * (step + 1)}
        times = {"step": 10.0 + step, "generate": 5.0, "score": 1.0, "train": 2.0 + step, "weight_sync": 0.5}
        rows.append({**row, "time": times})
    return rows


def draw(rows: list[dict[str, Any]], summary: dict[str, Any] | None = None) -> Figure:
    run = RecordedRun(Path("x"), rows, summary or {}, config={}, starts=[], moments=[])
    return curves_figure(rows, run.summary, evaluations(run))


def line_of(axes: Axes) -> tuple[list[float], list[float]]:
    line = axes.lines[0]
    return np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist()


def texts_of(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_curves_show_the_metrics() -> None:
    rows = make_rows(100)
    figure = draw(rows)
    metrics = {REWARD: "reward", LENGTH: "response_tokens", KEPT: "kept_share", HEALTH: "logprob_gap_max"}
    for panel, key in metrics.items():
        axes = figure.axes[panel]
        assert line_of(axes) == ([row["step"] + 1 for row in rows], [row[key] for row in rows])
        assert (axes.get_yscale() == "log") == (panel == HEALTH)


def test_missing_values_are_gaps_and_single_points_stay_visible() -> None:
    rows = make_rows(80)
    for step in (2, 4):
        rows[step]["reward"] = None
    del rows[6]["reward"]
    line = draw(rows).axes[REWARD].lines[0]
    values = np.asarray(line.get_ydata(), dtype=float)
    assert np.flatnonzero(np.isnan(values)).tolist() == [2, 4, 6]
    assert {3, 5} <= set(line.get_markevery())  # type: ignore[arg-type]
    assert values[3] == rows[3]["reward"]


def errorbar_of(figure: Figure) -> tuple[list[float], list[float], list[list[float]]]:
    (container,) = (c for c in figure.axes[ACCURACY].containers if isinstance(c, ErrorbarContainer))
    line, _, (bars,) = container.lines
    intervals = [[segment[0][1], segment[1][1]] for segment in bars.get_segments()]
    return np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist(), intervals


def test_accuracy_comes_from_evaluations_and_summary() -> None:
    rows = make_rows(6)
    rows[2].update(pass_at_1=0.4, pass_at_1_low=0.35, pass_at_1_high=0.5, pass_at_4=0.6, pass_at_8=0.82)
    rows[5].update(pass_at_1=0.6, pass_at_1_low=0.55, pass_at_1_high=0.65)  # The summary replaces this evaluation.
    figure = draw(rows, SUMMARY)
    x, y, intervals = errorbar_of(figure)
    assert (x, y) == ([0, 3, 6], [0.153, 0.4, 0.637])
    np.testing.assert_allclose(intervals, [[0.13, 0.18], [0.35, 0.5], [0.6, 0.67]])
    handles, labels = figure.axes[ACCURACY].get_legend_handles_labels()
    (line,) = (h for h, name in zip(handles, labels, strict=True) if name == "pass@8")
    assert np.asarray(line.get_xdata()).tolist() == [0, 3, 6]  # type: ignore[attr-defined]
    assert np.asarray(line.get_ydata()).tolist() == [0.857, 0.82, 0.77]  # type: ignore[attr-defined]


def test_accuracy_of_a_running_run() -> None:
    rows = make_rows(3)
    rows[1].update(pass_at_1=0.4)
    x, y, intervals = errorbar_of(draw(rows))
    assert (x, y, intervals) == ([2], [0.4], [[0.4, 0.4]])
    assert texts_of(draw(make_rows(3)).axes[ACCURACY]) == ["no evaluation yet"]


def test_step_time_is_stacked_and_adds_up() -> None:
    rows = make_rows(count := 6)
    patches = draw(rows).axes[SECONDS].patches
    bands = {str(p.get_label()): p for p in patches if isinstance(p, StepPatch)}
    assert list(bands) == ["generate", "score", "train", "weight_sync", "other"]
    below = np.zeros(count)
    for phase in ("generate", "score", "train", "weight_sync"):
        values, edges, baseline = bands[phase].get_data()
        np.testing.assert_allclose(edges, np.arange(count + 1) + 0.5)
        np.testing.assert_allclose(baseline, below)
        np.testing.assert_allclose(values - below, [row["time"][phase] for row in rows])
        below = values
    np.testing.assert_allclose(bands["other"].get_data()[0], [row["time"]["step"] for row in rows])


def test_zeros_are_gaps_on_the_log_scale() -> None:
    rows = make_rows(3)
    rows[1]["logprob_gap_max"] = 0.0
    values = line_of(draw(rows).axes[HEALTH])[1]
    assert [math.isnan(v) for v in values] == [False, True, False]
    for row in rows:
        row["logprob_gap_max"] = 0.0
    assert texts_of(draw(rows).axes[HEALTH]) == ["exactly 0 at every step"]


def test_title() -> None:
    passes = "held-out pass@1 15.3% → 63.7%, pass@8 85.7% → 77.0% (256 prompts)"
    title = draw(make_rows(6), SUMMARY).get_suptitle()
    assert title.split("   ·   ") == ["N = 512 rollouts per prompt", "6 training steps", passes, "22.1 min"]
    assert draw(make_rows(1)).get_suptitle() == "1 training step"


@pytest.mark.filterwarnings("error")
def test_no_text_overlaps_another() -> None:
    for figure in (draw(make_rows(6), SUMMARY), draw(make_rows(100), SUMMARY), draw([])):
        figure.draw_without_rendering()
        boxes = [box for axes in figure.axes if (box := axes.get_tightbbox()) is not None]
        assert len(boxes) == 6
        for i, box in enumerate(boxes):
            assert not any(box.overlaps(other) for other in boxes[:i])
            assert box.x0 >= 0
            assert box.y1 <= figure._suptitle.get_window_extent().y0  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("error")
def test_plot_run_reads_the_files_of_a_run(tmp_path: Path) -> None:
    with closing(MetricsWriter(tmp_path)) as metrics:
        for row in make_rows(6):
            values = {key: value for key, value in row.items() if key not in ("step", "time")}
            values["reward"] = math.nan if row["step"] == 3 else row["reward"]
            metrics.write(row["step"], values, row["time"])
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    path = plot_run(tmp_path)
    assert path == tmp_path / "curves.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["curves.png", "metrics.jsonl", "summary.json"]
    (tmp_path / "summary.json").write_text("[]")
    with pytest.raises(UserError, match=r"summary\.json: .*delete it to report without it"):
        plot_run(tmp_path)
