"""Train with N = 16 until held-out pass@1 stalls; then go on for the same training seconds with N = 16 or N = 512.

python tools/prorl_vs_brorl.py examples/prorl_vs_brorl_tiny.toml runs/prorl_vs_brorl_tiny --seconds 900 --seeds 0 1 2

Both arms begin with the weights of the stalled run and a new optimizer; rollouts and prompts per step differ. The
learning rate follows optim.lr_for_rollouts. Seconds are of training steps; evaluations are not counted. Runs that are
complete are not repeated, so the same command goes on. Writes results.json, .md and .png into the directory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from megatron_brorl.algo.paired import paired
from megatron_brorl.errors import UserError
from megatron_brorl.metrics import read_metrics
from megatron_brorl.report.benchmarks import table
from megatron_brorl.report.comparison import read_answers
from megatron_brorl.report.style import BLUE, ORANGE, panel, save

REPOSITORY = Path(__file__).parents[1]
ARMS = {
    "prorl": {"rollout.n": 16, "rollout.prompts": 96},
    "brorl": {"rollout.n": 512, "rollout.prompts": 24},
}
COLORS = {"prorl": ORANGE, "brorl": BLUE}
RESAMPLES = 10_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="TOML file of the runs")
    parser.add_argument("directory", type=Path, help="where all runs and the results go")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=720.0, help="of training per arm and seed (%(default)s)")
    parser.add_argument("--base-seconds", type=float, default=1200.0, help="of the run before, at most (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--samples", type=int, default=16, help="per prompt in the final evaluation (%(default)s)")
    args, overrides = parser.parse_known_args()
    wrong = [x for x in overrides if x.startswith("-") or "=" not in x]
    if wrong:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    base = prepare(args, overrides)
    for seed in args.seeds:
        for arm, settings in ARMS.items():
            run = args.directory / f"{arm}_{seed}"
            changes = {**settings, "model.path": base / "model", "run.seed": seed + 1, "train.seconds": args.seconds}
            train(args, run, [*overrides, *assignments(changes), "train.stalls=0"])
            # The seed of the evaluation is the same everywhere, so that answers are paired.
            evaluate(args, run / "model", evaluated_in(args, arm, seed), [*overrides, "run.seed=0"])
    results = collect(args)
    (args.directory / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    text = markdown(results)
    (args.directory / "results.md").write_text(text, encoding="utf-8")
    save(build_figure(results), args.directory / "results.png")
    print(text)


def prepare(args: argparse.Namespace, overrides: list[str]) -> Path:
    """The model, its warm start, and the run with N = 16 that stalls or is out of time."""
    root: Path = args.directory
    if not (root / "sft" / "model" / "config.json").exists():
        run(
            [
                sys.executable,
                str(REPOSITORY / "tools" / "make_tiny_model.py"),
                args.config,
                str(root / "init"),
                *overrides,
            ]
        )
        changes = {"model.path": root / "init", "run.dir": root / "sft", "data.train_seed": 3}
        brorl(args, "sft", [*overrides, *assignments(changes)])
    changes = {**ARMS["prorl"], "model.path": root / "sft" / "model", "train.seconds": args.base_seconds}
    train(args, root / "base", [*overrides, *assignments(changes)])
    return root / "base"


def train(args: argparse.Namespace, directory: Path, overrides: list[str]) -> None:
    if not (directory / "summary.json").exists():
        brorl(args, "train", [*overrides, f"run.dir={directory}"])


def evaluate(args: argparse.Namespace, model: Path, directory: Path, overrides: list[str]) -> None:
    if not (directory / "evaluation.json").exists():
        options = [f"model.path={model}", f"run.dir={directory}", f"--samples={args.samples}"]
        brorl(args, "evaluate", [*overrides, *options])


def evaluated_in(args: argparse.Namespace, arm: str, seed: int) -> Path:
    return args.directory / f"{arm}_{seed}_evaluated"


def collect(args: argparse.Namespace) -> dict[str, Any]:
    """The results of runs that are complete, as JSON."""
    directory: Path = args.directory
    return {
        "command": " ".join(sys.argv),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {args.processes} processes",
        "date": time.strftime("%Y-%m-%d"),
        "seconds_per_arm": args.seconds,
        "base": summary_of(directory / "base", None),
        "settings": ARMS,
        "arms": {
            arm: {str(s): summary_of(directory / f"{arm}_{s}", evaluated_in(args, arm, s)) for s in args.seeds}
            for arm in ARMS
        },
        "paired": pair(args),
    }


def assignments(changes: dict[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in changes.items()]


def brorl(args: argparse.Namespace, command: str, rest: list[str]) -> None:
    head = [sys.executable, "-m", "megatron_brorl", command, "--processes", str(args.processes), args.config]
    run([*head, *rest])


def run(command: list[str]) -> None:
    print("==", " ".join(command), flush=True)
    done = subprocess.run(command, check=False)
    if done.returncode:
        raise UserError(
            f"{' '.join(command[:4])} ended with {done.returncode}; mend it and start the same command again"
        )


def summary_of(directory: Path, evaluated: Path | None) -> dict[str, Any]:
    """The curve of a run (seconds of training, samples, pass@1, pass@k), and means over its steps."""
    rows = read_metrics(directory / "metrics.jsonl")
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    seconds = list(accumulate(row["time"]["step"] for row in rows))
    samples = list(accumulate(row["rollouts"] for row in rows))
    k = max(map(int, summary["after"]["pass_at_k"]))
    curve = [(0.0, 0.0, *passes(summary["before"], k))]
    curve += [
        (s, n, row["pass_at_1"], row[f"pass_at_{k}"])
        for s, n, row in zip(seconds, samples, rows, strict=True)
        if "pass_at_1" in row
    ]
    curve.append((seconds[-1], samples[-1], *passes(summary["after"], k)))
    kept = [row["kept_share"] for row in rows if row["kept_share"] is not None]
    found = {
        "curve": {"columns": ["seconds", "samples", "pass_at_1", f"pass_at_{k}"], "rows": curve},
        "steps": len(rows),
        "kept_share": sum(kept) / len(kept),
        "samples_per_s": samples[-1] / seconds[-1],
        "response_tokens": rows[-1]["response_tokens"],
    }
    if evaluated:
        result = json.loads((evaluated / "evaluation.json").read_text(encoding="utf-8"))
        found["final"] = {key: result[key] for key in ("pass_at_1", "pass_at_k", "by_task", "response_tokens")}
    return found


def passes(evaluation: dict[str, Any], k: int) -> tuple[float, float]:
    return evaluation["pass_at_1"]["mean"], evaluation["pass_at_k"][str(k)]


def pair(args: argparse.Namespace) -> dict[str, Any]:
    """brorl - prorl: over prompts, each prompt's pass@1 averaged over seeds, and over the seeds' own means."""
    scores: dict[str, list[dict[Any, float]]] = {}
    for arm in ARMS:
        paths = [evaluated_in(args, arm, seed) / "evaluation.jsonl" for seed in args.seeds]
        scores[arm] = [{key: a["right"] / a["samples"] for key, a in read_answers(path).items()} for path in paths]
    keys = sorted(scores["prorl"][0])
    means = {arm: [sum(s[key] for s in parts) / len(parts) for key in keys] for arm, parts in scores.items()}
    found = {"over_prompts": paired(means["prorl"], means["brorl"], RESAMPLES, 0).as_dict()}
    if len(args.seeds) > 1:
        own = {arm: [sum(s.values()) / len(s) for s in parts] for arm, parts in scores.items()}
        found["over_seeds"] = paired(own["prorl"], own["brorl"], RESAMPLES, 0).as_dict()
    return found


def markdown(results: dict[str, Any]) -> str:
    """One row per arm and seed, one per task, and what the paired tests say."""
    rows = [["arm", "seed", "steps", "samples", "kept", "samples/s", "tokens", "pass@1 (95% interval)", "pass@k"]]
    tasks: dict[str, dict[str, list[float]]] = {}
    for arm, seeds in results["arms"].items():
        for seed, part in seeds.items():
            final = part["final"]
            p, (k, passed) = final["pass_at_1"], list(final["pass_at_k"].items())[-1]
            cells = [arm, seed, str(part["steps"]), f"{part['curve']['rows'][-1][1]:.0f}", f"{part['kept_share']:.1%}"]
            cells += [f"{part['samples_per_s']:.0f}", f"{final['response_tokens']:.2f}"]
            rows.append([*cells, f"{p['mean']:.2%} ({p['low']:.2%} to {p['high']:.2%})", f"{passed:.2%} (k = {k})"])
            for task, value in final["by_task"].items():
                tasks.setdefault(task, {}).setdefault(arm, []).append(value)
    by_task = [["task", *ARMS], *([t, *(f"{mean(tasks[t][arm]):.2%}" for arm in ARMS)] for t in sorted(tasks))]
    said = []
    for over, test in results["paired"].items():
        d = test["difference"]
        said.append(
            f"* {over.replace('_', ' ')}: brorl - prorl = {d['mean']:+.4f} ({d['low']:+.4f} to {d['high']:+.4f}), "
            f"t = {test['t']:.2f}, {test['degrees']} degrees of freedom, one-tailed p = {test['one_tailed']:.2g}"
        )
    start = results["base"]["curve"]["rows"][-1]
    head = (
        f"`{results['command']}`, {results['machine']}, {results['date']}: from a run with N = 16 of {start[0]:.0f} s "
        f"that ended at pass@1 {start[2]:.2%}, {results['seconds_per_arm']:.0f} s of training per arm and seed."
    )
    return "\n".join([head, "", table(rows), table(by_task), *said]) + "\n"


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def build_figure(results: dict[str, Any]) -> Figure:
    """pass@1 and pass@k over training seconds, pass@1 over samples, and the kept share; one line per seed."""
    figure = Figure(figsize=(13.5, 7.6), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    (first, kth), (samples, kept) = figure.subplots(2, 2)
    name = next(iter(results["arms"]["prorl"].values()))["curve"]["columns"][3].replace("pass_at_", "pass@")
    panel(first, "Held-out accuracy over time", "pass@1", "training seconds after the stall")
    panel(kth, "At least one right over time", name, "training seconds after the stall")
    panel(samples, "Held-out accuracy over samples", "pass@1", "samples after the stall")
    panel(kept, "Dynamic sampling", "prompts kept", "arm")
    for place, (arm, seeds) in enumerate(results["arms"].items()):
        for i, part in enumerate(seeds.values()):
            rows, label = part["curve"]["rows"], f"{arm}, N = {ARMS[arm]['rollout.n']}" if i == 0 else None
            line(first, rows, 0, 2, COLORS[arm], label)
            line(kth, rows, 0, 3, COLORS[arm], None)
            line(samples, rows, 1, 2, COLORS[arm], None)
            kept.plot(place, part["kept_share"], "o", color=COLORS[arm])
    kept.set_xticks(range(len(ARMS)), list(ARMS))
    kept.set_ylim(0, 1)
    first.legend(frameon=False, fontsize=9)
    return figure


def line(axes: Axes, rows: list[list[float]], x: int, y: int, color: str, label: str | None) -> None:
    axes.plot([r[x] for r in rows], [r[y] for r in rows], color=color, marker="o", markersize=3, label=label)


if __name__ == "__main__":
    try:
        main()
    except UserError as e:
        print(f"prorl_vs_brorl: {e}", file=sys.stderr)
        sys.exit(2)
