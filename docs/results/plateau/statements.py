"""Print the statements of README.md that are not comparisons, as Markdown tables.

python docs/results/plateau/statements.py runs/continue runs/pass64
"""

import json
import sys
from pathlib import Path

import pandas as pd
from scipy import stats


def gains(table: pd.DataFrame) -> pd.DataFrame:
    """Return the final minus the first value of each run, with the mean and 95% interval over the runs of an arm."""
    ends = table.sort_values("steps").groupby(["arm", "seed"])[["pass_at_1", "pass_at_8"]].agg(["first", "last"])
    rows = []
    for metric in ("pass_at_1", "pass_at_8"):
        for arm, gain in (ends[metric]["last"] - ends[metric]["first"]).groupby("arm"):
            low, high = stats.ttest_1samp(gain, 0).confidence_interval()
            by_seed = ", ".join(f"{g:+.1%}" for g in gain)
            rows.append((arm, metric, by_seed, f"{gain.mean():+.1%}", f"{low:+.1%} to {high:+.1%}"))
    return pd.DataFrame(rows, columns=["arm", "metric", "by seed", "mean", "interval"])


def means(run: Path) -> dict[str, float]:
    """Return the means of a run's metrics over its steps."""
    steps = pd.json_normalize([json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()])
    rated = steps["theory_estimate/sampled"].dropna()
    return {
        "kept share": steps.kept_share.mean(),
        "unsampled mass": steps["theory_exact/unsampled_mass"].mean(),
        "steps with a positive sampled term": (rated > 0).mean(),
        "lowest bound of the unsampled term": steps["theory_bound/unsampled_low"].min(),
        "rollouts per second of generation": steps.rollouts.sum() / steps["time.generate"].sum(),
        "seconds per 1,000 rollouts": 1000 * steps["time.step"].sum() / steps.rollouts.sum(),
    }


def show(table: pd.DataFrame) -> None:
    cells = [[f"{x:.3g}" if isinstance(x, float) else str(x) for x in row] for row in table.to_numpy().tolist()]
    print("\n".join(f"| {' | '.join(row)} |" for row in [[*table], ["---"] * len(table.columns), *cells]), "\n")


def main(study: Path, pass64: Path | None = None) -> None:
    table = pd.read_parquet(study / "results.parquet").query("phase == 'test'")
    show(gains(table))
    show(pd.DataFrame([{"run": run} | means(study / "runs" / run) for run in table.run.unique()]))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
