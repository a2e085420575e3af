"""Draw curves.png and print the tables of README.md from the three studies.

python docs/results/plateau/statements.py runs/plateau runs/continue runs/hard

The folder runs/pass64 has an evaluation with 64 samples of each model of the second phase.
"""

import json
import sys
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from scipy import stats

COLORS = {"n16": "C0", "n512": "C1", "n16-maxrl": "C2", "n512-maxrl": "C3"}


def gains(table: pd.DataFrame) -> pd.DataFrame:
    """Return the final minus the first value of each run, with the mean and 95% interval over the runs of an arm."""
    metrics = [name for name in ("pass_at_1", "pass_at_8", "pass_at_64") if name in table]
    ends = table.sort_values("steps").groupby(["arm", "seed"])[metrics].agg(["first", "last"])
    rows = []
    for metric in metrics:
        for arm, gain in (ends[metric]["last"] - ends[metric]["first"]).groupby("arm"):
            low, high = stats.ttest_1samp(gain, 0).confidence_interval()
            by_seed = ", ".join(f"{100 * g:+.1f}" for g in gain)
            rows.append((arm, metric, by_seed, f"{100 * gain.mean():+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"))
    return pd.DataFrame(rows, columns=["arm", "metric", "points by seed", "mean (95% interval)"])


def means(run: Path) -> dict[str, float]:
    """Return means over the steps of a run, and its rollouts per second."""
    steps = pd.json_normalize([json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()])
    estimated = steps["theory_estimate/sampled"].dropna()
    return {
        "kept share": steps.kept_share.mean(),
        "unsampled mass": steps["theory_exact/unsampled_mass"].mean(),
        "steps with a positive sampled term": (estimated > 0).mean(),
        "rollouts/s, generation": steps.rollouts.sum() / steps["time.generate"].sum(),
        "rollouts/s, steps": steps.rollouts.sum() / steps["time.step"].sum(),
    }


def pass_at_64(study: Path) -> dict[str, float]:
    """Return pass@64 of the evaluated models."""
    evaluations = sorted((study.parent / "pass64").glob("*/evaluation.json"))
    return {path.parent.name: json.loads(path.read_text())["pass_at_k"]["64"] for path in evaluations}


def curves(axes: Axes, table: pd.DataFrame, x: str, offset: float = 0) -> None:
    """Draw pass@1 of each run over column `x` as a thin line, and the mean of each arm as a thick one."""
    for arm, runs in table.groupby("arm"):
        for _, run in runs.groupby("seed"):
            axes.plot(offset + run[x], run.pass_at_1, color=COLORS[arm], alpha=0.35, linewidth=0.8)
        # Only the steps that all runs of the arm have reached count.
        by_step = runs.groupby("steps")
        mean = by_step[[x, "pass_at_1"]].mean()[by_step.seed.nunique() == runs.seed.nunique()]
        axes.plot(offset + mean[x], mean.pass_at_1, color=COLORS[arm], linewidth=2, label=arm)
    axes.set_xlabel("seconds of training steps" if x == "seconds" else x)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(axis="y", alpha=0.3)


def draw(plateau: pd.DataFrame, continued: pd.DataFrame, hard: pd.DataFrame) -> Figure:
    figure = Figure(figsize=(13, 4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    left.plot(plateau.rollouts, plateau.pass_at_1, color="black", linewidth=2, label="n16, plateau")
    curves(left, continued, "rollouts", offset=plateau.rollouts.iloc[-1])
    curves(middle, continued, "seconds")
    curves(right, hard, "seconds")
    left.set_title("plateau, then N = 16 or N = 512")
    middle.set_title("from the plateau, equal seconds")
    right.set_title("8 hard prompts from the plateau")
    left.set_ylabel("pass@1 of held-out prompts")
    right.set_ylabel("pass@1 of the trained prompts")
    left.legend(frameon=False)
    right.legend(frameon=False)
    return figure


def show(table: pd.DataFrame) -> None:
    cells = [[f"{x:.3g}" if isinstance(x, float) else str(x) for x in row] for row in table.to_numpy().tolist()]
    print("\n".join(f"| {' | '.join(row)} |" for row in [[*table], ["---"] * len(table.columns), *cells]), "\n")


def main(*studies: Path) -> None:
    tables = [pd.read_parquet(study / "results.parquet") for study in studies]
    tests = [table.query("phase == 'test'") for table in tables]
    draw(*tests).savefig(Path(__file__).parent / "curves.png", dpi=110)
    pd.concat(tables).to_parquet(Path(__file__).parent / "results.parquet")
    for study, table in zip(studies, tests, strict=True):
        if table.run.nunique() > 1:
            show(gains(table))
        show(pd.DataFrame([{"run": run} | means(study / "runs" / run) for run in table.run.unique()]))
    print(pass_at_64(studies[0]))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
