"""The comparison of the two arms reads runs as they are written: curves, means and pairs against sums by hand."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import prorl_vs_brorl
import prorl_vs_brorl_report

SEEDS = [0, 1]
# right of 4 samples, by arm, seed and prompt
RIGHT = {"prorl": [[1, 2, 0], [2, 2, 1]], "brorl": [[2, 2, 1], [3, 4, 1]]}


def interval(mean):
    return {"mean": mean, "low": mean - 0.1, "high": mean + 0.1}


def run_of(directory, seconds, rollouts):
    directory.mkdir(parents=True)
    rows = []
    for step, s in enumerate(seconds):
        row = {"step": step, "rollouts": rollouts, "kept_share": 0.5 + step / 8, "response_tokens": 5.0 + step}
        if step == 1:
            row |= {"pass_at_1": 0.5, "pass_at_4": 0.75, "pass_at_1_low": 0.4, "pass_at_1_high": 0.6}
        rows.append(json.dumps(row | {"time": {"step": s, "evaluate": 100.0}}))
    (directory / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    before = {"pass_at_1": interval(0.25), "pass_at_k": {"1": 0.25, "4": 0.5}}
    after = {"pass_at_1": interval(0.625), "pass_at_k": {"1": 0.625, "4": 0.875}}
    (directory / "summary.json").write_text(json.dumps({"before": before, "after": after}))


def evaluation_of(directory, right):
    directory.mkdir()
    lines = [
        {"benchmark": "held_out", "id": str(i), "samples": 4, "right": r, "tokens": 5.0} for i, r in enumerate(right)
    ]
    (directory / "evaluation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    mean = sum(right) / 12
    passes, tasks = {"1": mean, "4": 1.0}, {"gcd": mean, "chain_sum": 0.125}
    result = {"pass_at_1": interval(mean), "pass_at_k": passes, "by_task": tasks, "response_tokens": 5.0}
    (directory / "evaluation.json").write_text(json.dumps(result))


@pytest.fixture
def directory(tmp_path):
    run_of(tmp_path / "base", [1.0, 2.0, 4.0], 10)
    evaluation_of(tmp_path / "base_evaluated", [1, 1, 1])
    for arm in ("prorl", "brorl"):
        for seed in SEEDS:
            run_of(tmp_path / f"{arm}_{seed}", [1.0, 2.0, 4.0], 10 if arm == "prorl" else 80)
            evaluation_of(tmp_path / f"{arm}_{seed}_evaluated", RIGHT[arm][seed])
    return tmp_path


def test_curves_count_training_alone(directory):
    found = prorl_vs_brorl.summary_of(directory / "brorl_0")
    assert found["curve"]["columns"][:4] == ["seconds", "samples", "pass_at_1", "pass_at_4"]
    assert found["curve"]["columns"][4:] == ["pass_at_1_low", "pass_at_1_high", "kept_share"]
    start, middle, end = found["curve"]["rows"]
    assert start == [0, 0, 0.25, 0.5, pytest.approx(0.15), 0.35, None]
    assert middle == [3, 160, 0.5, 0.75, 0.4, 0.6, (0.5 + 0.625) / 2]
    assert end == [7, 240, 0.625, 0.875, 0.525, 0.725, 0.75]
    assert found["samples_per_s"] == pytest.approx(240 / 7)
    assert found["kept_share"] == pytest.approx((0.5 + 0.625 + 0.75) / 3)
    assert found["final"]["pass_at_1"]["mean"] == pytest.approx(5 / 12)


def by_hand(differences):
    """Mean and t of Student's paired test."""
    n, mean = len(differences), sum(differences) / len(differences)
    return mean, mean / math.sqrt(sum((x - mean) ** 2 for x in differences) / (n - 1) / n)


def test_pairs_over_prompts_and_over_seeds(directory):
    found = prorl_vs_brorl.pair(argparse.Namespace(directory=directory, seeds=SEEDS))
    expected = {
        ("brorl - prorl", "over prompts"): [(2 + 3 - 1 - 2) / 8, (2 + 4 - 2 - 2) / 8, (1 + 1 - 0 - 1) / 8],
        ("brorl - prorl", "seed 0, over prompts"): [1 / 4, 0, 1 / 4],
        ("brorl - prorl", "seed 1, over prompts"): [1 / 4, 2 / 4, 0],
        ("brorl - prorl", "over seeds"): [(5 - 3) / 12, (8 - 5) / 12],
        ("prorl - base", "over prompts"): [3 / 8 - 1 / 4, 4 / 8 - 1 / 4, 1 / 8 - 1 / 4],
        ("brorl - base", "over prompts"): [5 / 8 - 1 / 4, 6 / 8 - 1 / 4, 2 / 8 - 1 / 4],
    }
    assert [(name, over) for name, parts in found.items() for over in parts] == list(expected)
    for (name, over), differences in expected.items():
        mean, t = by_hand(differences)
        assert found[name][over]["difference"]["mean"] == pytest.approx(mean, abs=1e-12)
        assert found[name][over]["t"] == pytest.approx(t)
        assert found[name][over]["degrees"] == len(differences) - 1


def arguments(directory, model=None):
    return argparse.Namespace(
        directory=directory, seeds=SEEDS, processes=2, seconds=7.0, model=model, prompts=[96, 24], every=[40, 8]
    )


def test_results_hold_what_the_runs_hold(directory):
    args = arguments(directory)
    results = json.loads(json.dumps(prorl_vs_brorl.collect(args)))
    assert results["arms"]["prorl"]["1"]["steps"] == 3
    assert results["settings"]["brorl"] == {"rollout.n": 512, "rollout.prompts": 24, "evaluate.every": 8}
    text = prorl_vs_brorl_report.markdown(results)
    assert "| brorl | 1 | 3 | 240 | 62.5% | 34 | 5.00 | 66.67% (56.67% to 76.67%) | 100.00% (k = 4) |" in text
    assert "| gcd | 25.00% | 33.33% (25.00% to 41.67%) | 54.17% (41.67% to 66.67%) |" in text
    assert "from a run with N = 16 of 3 steps, 7 s of training" in text
    assert "| base |  | 3 | 30 | 62.5% | 4 | 5.00 | 25.00% (15.00% to 35.00%) | 100.00% (k = 4) |" in text
    figure = prorl_vs_brorl_report.build_figure(results)
    first, samples, kth, kept, tasks, gaps = figure.axes
    assert [len(axes.lines) for axes in (first, samples, kth, kept)] == [
        5,
        5,
        4,
        4,
    ]  # two of them with the base's level
    assert list(first.lines[0].get_xdata()) == [0, 3, 7]
    assert list(samples.lines[3].get_xdata()) == pytest.approx([0, 0.16, 0.24])
    assert list(kth.lines[3].get_ydata()) == [0.5, 0.75, 0.875]
    assert list(kept.lines[3].get_ydata()) == [(0.5 + 0.625) / 2, 0.75]
    assert [bar.get_height() for bar in tasks.patches] == pytest.approx([0.125, 0.25, 0.125, 1 / 3, 0.125, 13 / 24])
    assert gaps.lines[0].get_ydata()[0] == pytest.approx(
        results["paired"]["brorl - prorl"]["over prompts"]["difference"]["mean"]
    )


def test_results_of_arms_that_begin_with_a_model(directory):
    shutil.rmtree(directory / "base")  # a model that was evaluated is all there is
    results = json.loads(json.dumps(prorl_vs_brorl.collect(arguments(directory, Path("model")))))
    assert results["base"]["steps"] == 0
    text = prorl_vs_brorl_report.markdown(results)
    assert "from a model, 7 s of training" in text
    assert "| base |  |  |  |  |  | 5.00 | 25.00% (15.00% to 35.00%) | 100.00% (k = 4) |" in text
    first = prorl_vs_brorl_report.build_figure(results).axes[0]
    assert list(first.lines[-1].get_ydata()) == [0.25, 0.25]


def test_whiskers_of_equal_values_are_not_negative():
    assert sum([0.1] * 3) / 3 > 0.1  # in floating point
    assert prorl_vs_brorl_report.whiskers([0.1] * 3) == (pytest.approx(0, abs=1e-15), 0)
    assert prorl_vs_brorl_report.whiskers([0.25, 0.5, 1.5]) == (0.5, 0.75)
