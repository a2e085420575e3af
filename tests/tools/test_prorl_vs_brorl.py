"""The comparison of the two arms reads runs as they are written: curves, means and pairs against sums by hand."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import prorl_vs_brorl

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
            row |= {"pass_at_1": 0.5, "pass_at_4": 0.75}
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
    for arm in ("prorl", "brorl"):
        for seed in SEEDS:
            run_of(tmp_path / f"{arm}_{seed}", [1.0, 2.0, 4.0], 10 if arm == "prorl" else 80)
            evaluation_of(tmp_path / f"{arm}_{seed}_evaluated", RIGHT[arm][seed])
    return tmp_path


def test_curves_count_training_alone(directory):
    found = prorl_vs_brorl.summary_of(directory / "brorl_0", directory / "brorl_0_evaluated")
    assert found["curve"]["columns"] == ["seconds", "samples", "pass_at_1", "pass_at_4"]
    assert found["curve"]["rows"] == [(0, 0, 0.25, 0.5), (3, 160, 0.5, 0.75), (7, 240, 0.625, 0.875)]
    assert found["samples_per_s"] == pytest.approx(240 / 7)
    assert found["kept_share"] == pytest.approx((0.5 + 0.625 + 0.75) / 3)
    assert found["final"]["pass_at_1"]["mean"] == pytest.approx(5 / 12)


def test_pairs_over_prompts_and_over_seeds(directory):
    args = argparse.Namespace(directory=directory, seeds=SEEDS)
    found = prorl_vs_brorl.pair(args)
    d = [(2 + 3 - 1 - 2) / 8, (2 + 4 - 2 - 2) / 8, (1 + 1 - 0 - 1) / 8]
    mean = sum(d) / 3
    error = math.sqrt(sum((x - mean) ** 2 for x in d) / 2 / 3)
    assert found["over_prompts"]["t"] == pytest.approx(mean / error)
    assert found["over_prompts"]["difference"]["mean"] == pytest.approx(mean)
    per_seed = [(5 - 3) / 12, (8 - 5) / 12]
    assert found["over_seeds"]["difference"]["mean"] == pytest.approx(sum(per_seed) / 2)
    assert found["over_seeds"]["degrees"] == 1


def test_results_hold_what_the_runs_hold(directory):
    args = argparse.Namespace(directory=directory, seeds=SEEDS, processes=2, seconds=7.0)
    results = prorl_vs_brorl.collect(args)
    assert json.loads(json.dumps(results))["arms"]["prorl"]["1"]["steps"] == 3
    text = prorl_vs_brorl.markdown(results)
    assert "| brorl | 1 | 3 | 240 | 62.5% | 34 | 5.00 | 66.67% (56.67% to 76.67%) | 100.00% (k = 4) |" in text
    assert f"| gcd | {(3 + 5) / 24:.2%} | {(5 + 8) / 24:.2%} |" in text
    assert "pass@1 62.50%" in text
    figure = prorl_vs_brorl.build_figure(results)
    assert list(figure.axes[0].lines[0].get_xdata()) == [0, 3, 7]
    assert list(figure.axes[1].lines[-1].get_ydata()) == [0.5, 0.75, 0.875]
    assert list(figure.axes[2].lines[-1].get_xdata()) == [0, 160, 240]
