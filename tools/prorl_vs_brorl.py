"""Train with N = 16 until held-out pass@1 stalls; then go on for the same training seconds with N = 16 or N = 512.

python tools/prorl_vs_brorl.py examples/prorl_vs_brorl_tiny.toml runs/prorl_vs_brorl_tiny --seconds 300 --seeds 0 1 2

With --model there is no run before: both arms begin with that model.

Both arms begin with the same weights and a new optimizer, which is warmed up; rollouts and prompts per step differ. The
learning rate follows optim.lr_for_rollouts. Both arms of a seed run side by side, each on half of the processes, so
that whatever else the machine does befalls both. Seconds are of training steps; evaluations are not counted. Runs that
are complete are not repeated, so the same command goes on. Writes results.json, .md and .png into the directory.
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

from prorl_vs_brorl_report import build_figure, markdown, mean

from megatron_brorl.algo.paired import paired
from megatron_brorl.errors import UserError
from megatron_brorl.metrics import read_metrics
from megatron_brorl.report.comparison import read_answers
from megatron_brorl.report.style import save

REPOSITORY = Path(__file__).parents[1]
ARMS = {"prorl": 16, "brorl": 512}  # N
BEGIN = "base"  # the run, or model, that both arms begin with
WARMUP = 16  # optimizer steps of an arm
RESAMPLES = 10_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="TOML file of the runs")
    parser.add_argument("directory", type=Path, help="where all runs and the results go")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=300.0, help="of training per arm and seed (%(default)s)")
    parser.add_argument("--base-seconds", type=float, default=1800.0, help="of the run before, at most (%(default)s)")
    parser.add_argument("--model", type=Path, help="that the arms begin with, in place of a run that stalls")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    both = f"of {' and '.join(ARMS)}" + " (%(default)s)"
    parser.add_argument("--prompts", type=int, nargs=2, default=[96, 24], help=f"per step {both}")
    parser.add_argument(
        "--every", type=int, nargs=2, default=[40, 8], help=f"steps from evaluation to evaluation {both}"
    )
    parser.add_argument("--lr", type=float, default=5e-5, help="optim.lr of both arms (%(default)s)")
    parser.add_argument("--samples", type=int, default=16, help="per prompt in the final evaluation (%(default)s)")
    args, overrides = parser.parse_known_args()
    wrong = [x for x in overrides if x.startswith("-") or "=" not in x]
    if wrong:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")

    # All arms begin with the same model, and are evaluated alike.
    begin = args.model or prepare(args, overrides)
    evaluate(args, begin, args.directory / BEGIN, overrides)
    for seed in args.seeds:
        train_arms(args, seed, begin, overrides)
        for arm in ARMS:
            run = args.directory / f"{arm}_{seed}"
            evaluate(args, run / "model", run, overrides)

    # Tables and figure are made of the files alone.
    results = collect(args)
    (args.directory / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    text = markdown(results)
    (args.directory / "results.md").write_text(text, encoding="utf-8")
    save(build_figure(results), args.directory / "results.png")
    print(text)


def prepare(args: argparse.Namespace, overrides: list[str]) -> Path:
    """Make a model, its warm start, and the run with N = 16 that stalls or is out of time; its model."""
    root: Path = args.directory
    if not (root / "sft" / "model" / "config.json").exists():
        make = [sys.executable, str(REPOSITORY / "tools" / "make_tiny_model.py"), args.config, str(root / "init")]
        run([*make, *overrides])
        changes = {"model.path": root / "init", "run.dir": root / "sft", "data.train_seed": 3}
        brorl(args, "sft", [*overrides, *assignments(changes)])
    changes = {"model.path": root / "sft" / "model", "train.max_seconds": args.base_seconds}
    train(args, root / BEGIN, [*overrides, *assignments(changes)])
    return root / BEGIN / "model"


def train(args: argparse.Namespace, directory: Path, overrides: list[str]) -> None:
    if not (directory / "summary.json").exists():
        brorl(args, "train", [*overrides, f"run.dir={directory}"])


def settings(args: argparse.Namespace) -> dict[str, dict[str, int]]:
    """What an arm has of its own."""
    return {
        arm: {"rollout.n": n, "rollout.prompts": prompts, "evaluate.every": every}
        for (arm, n), prompts, every in zip(ARMS.items(), args.prompts, args.every, strict=True)
    }


def train_arms(args: argparse.Namespace, seed: int, model: Path, overrides: list[str]) -> None:
    """Both arms of a seed at once; what they print goes into DIRECTORY/ARM_SEED.log."""
    processes = max(1, args.processes // len(ARMS))
    threads = max(1, (os.cpu_count() or 1) // (processes * len(ARMS)))
    started = []
    for arm, own in settings(args).items():
        directory = args.directory / f"{arm}_{seed}"
        if (directory / "summary.json").exists():
            continue
        changes = {**own, "optim.lr": args.lr, "optim.warmup_steps": WARMUP, "train.max_seconds": args.seconds}
        begin = {"model.path": model, "run.seed": seed + 1, "train.patience": 0, "run.dir": directory}
        command = brorl_command(args.config, "train", processes, [*overrides, *assignments(changes | begin)])
        log = directory.with_suffix(".log")
        print("==", " ".join(command), ">", log, flush=True)
        with open(log, "wb") as out:
            env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
            started.append((subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env), log))
    for process, log in started:
        if process.wait():
            raise UserError(f"{log}: a run ended with {process.returncode}; mend it and start the same command again")


def evaluate(args: argparse.Namespace, model: Path, run: Path, overrides: list[str]) -> None:
    """The final evaluation of a run's model; its seed is the same for all runs, so that answers are paired."""
    if not (evaluated(run) / "evaluation.json").exists():
        options = [
            f"model.path={model}",
            f"run.dir={evaluated(run)}",
            "run.seed=0",
            f"--samples={args.samples}",
        ]
        brorl(args, "evaluate", [*overrides, *options])


def evaluated(run: Path) -> Path:
    return run.with_name(f"{run.name}_evaluated")


def collect(args: argparse.Namespace) -> dict[str, Any]:
    """The results of runs that are complete, as JSON."""
    directory: Path = args.directory
    return {
        "command": " ".join(sys.argv),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {args.processes} processes",
        "date": time.strftime("%Y-%m-%d"),
        "seconds_per_arm": args.seconds,
        "settings": settings(args),
        "base": {"steps": 0, "final": final_of(directory / BEGIN)} if args.model else summary_of(directory / BEGIN),
        "arms": {arm: {str(s): summary_of(directory / f"{arm}_{s}") for s in args.seeds} for arm in ARMS},
        "paired": pair(args),
    }


def assignments(changes: dict[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in changes.items()]


def brorl(args: argparse.Namespace, command: str, rest: list[str]) -> None:
    run(brorl_command(args.config, command, args.processes, rest))


def brorl_command(config: str, command: str, processes: int, rest: list[str]) -> list[str]:
    return [sys.executable, "-m", "megatron_brorl", command, "--processes", str(processes), config, *rest]


def run(command: list[str]) -> None:
    print("==", " ".join(command), flush=True)
    done = subprocess.run(command, check=False)
    if done.returncode:
        raise UserError(
            f"{' '.join(command[:4])} ended with {done.returncode}; mend it and start the same command again"
        )


def summary_of(run: Path) -> dict[str, Any]:
    """The curve of a run by seconds of training, means over its steps, and its final evaluation.

    A row of the curve has the share of prompts kept since the row before, None where it is the first.
    """
    rows = read_metrics(run / "metrics.jsonl")
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    seconds = list(accumulate(row["time"]["step"] for row in rows))
    samples = list(accumulate(row["rollouts"] for row in rows))
    kept = [row["kept_share"] for row in rows]
    k = max(map(int, summary["after"]["pass_at_k"]))
    curve, begin = [[0.0, 0.0, *passes(summary["before"], k), None]], 0
    for i, row in enumerate(rows):
        if "pass_at_1" in row:
            scores = [row[key] for key in ("pass_at_1", f"pass_at_{k}", "pass_at_1_low", "pass_at_1_high")]
            curve.append([seconds[i], samples[i], *scores, mean(kept[begin : i + 1])])
            begin = i + 1
    curve.append([seconds[-1], samples[-1], *passes(summary["after"], k), mean(kept[begin:] or kept)])
    columns = ["seconds", "samples", "pass_at_1", f"pass_at_{k}", "pass_at_1_low", "pass_at_1_high", "kept_share"]
    return {
        "curve": {"columns": columns, "rows": curve},
        "steps": len(rows),
        "kept_share": mean(kept),
        "samples_per_s": samples[-1] / seconds[-1],
        "response_tokens": rows[-1]["response_tokens"],
        "final": final_of(run),
    }


def final_of(run: Path) -> dict[str, Any]:
    final = json.loads((evaluated(run) / "evaluation.json").read_text(encoding="utf-8"))
    return {key: final[key] for key in ("pass_at_1", "pass_at_k", "by_task", "response_tokens")}


def passes(evaluation: dict[str, Any], k: int) -> list[float]:
    p = evaluation["pass_at_1"]
    return [p["mean"], evaluation["pass_at_k"][str(k)], p["low"], p["high"]]


def pair(args: argparse.Namespace) -> dict[str, Any]:
    """Differences of pass@1: over prompts, each prompt's averaged over seeds; of each seed; over the seeds' means."""
    scores = {arm: [shares(args.directory / f"{arm}_{seed}") for seed in args.seeds] for arm in ARMS}
    base = shares(args.directory / BEGIN)
    keys = sorted(base)

    def over_prompts(before: list[dict[Any, float]], after: list[dict[Any, float]]) -> dict[str, object]:
        one, other = ([mean([part[key] for part in parts]) for key in keys] for parts in (before, after))
        return paired(one, other, RESAMPLES, 0).as_dict()

    arms = {"over prompts": over_prompts(scores["prorl"], scores["brorl"])}
    for seed, before, after in zip(args.seeds, scores["prorl"], scores["brorl"], strict=True):
        arms[f"seed {seed}, over prompts"] = over_prompts([before], [after])
    if len(args.seeds) > 1:
        own = {arm: [mean(list(part.values())) for part in parts] for arm, parts in scores.items()}
        arms["over seeds"] = paired(own["prorl"], own["brorl"], RESAMPLES, 0).as_dict()
    of_base = {f"{arm} - base": {"over prompts": over_prompts([base], scores[arm])} for arm in ARMS}
    return {"brorl - prorl": arms, **of_base}


def shares(run: Path) -> dict[Any, float]:
    """pass@1 of every prompt of a run's final evaluation."""
    return {key: a["right"] / a["samples"] for key, a in read_answers(evaluated(run) / "evaluation.jsonl").items()}


if __name__ == "__main__":
    try:
        main()
    except UserError as e:
        print(f"prorl_vs_brorl: {e}", file=sys.stderr)
        sys.exit(2)
