"""Read run folders and compute the content of a report, as JSON values.

The scripts in page/*.js draw this content. Values that a run has not recorded are missing or None.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from megatron_brorl.algo.pass_at_k import pass_at_each_k, pass_at_k
from megatron_brorl.algo.statistics import RESAMPLES, SHARE, SHARES, Bounds, bootstrap_mean, paired
from megatron_brorl.errors import UserError
from megatron_brorl.files import read_object
from megatron_brorl.report.findings import verdict
from megatron_brorl.rollout_log import FOLDER, LogEntry, entries, read_groups
from megatron_brorl.tracking import metric_docs, run_info
from megatron_brorl.tracking.metrics import METRICS_FILE, read_metrics

SUMMARY = "summary.json"
MAX_POINTS = 400  # of a curve; in longer runs each point is the mean of several steps
MAX_MOMENTS = 400  # A curve over more recorded steps reads the groups of this many, evenly spaced.
MAX_COUNTED_SAMPLES = 16  # The histogram counts up to this many samples one by one, and more in tenths.
TENTHS = ["none", *(f"{10 * i}-{10 * i + 10}%" for i in range(10)), "all"]

Row = Mapping[str, Any]
Key = tuple[str, int]  # prompt id, and number of earlier prompts with this id


@dataclass(frozen=True)
class RecordedRun:
    """The files of a running or finished run."""

    folder: Path
    rows: list[Row]  # lines of metrics.jsonl
    summary: Row  # summary.json; {} until the run has ended
    config: Mapping[str, Any]  # section -> key -> value; {} if it is not recorded
    starts: list[Row]  # of run.json
    moments: list[LogEntry]  # the steps and evaluations with recorded rollouts
    _groups: dict[LogEntry, pa.Table] = field(default_factory=dict)  # cache of `groups`

    @property
    def steps(self) -> int:
        """Return the number of finished steps."""
        return int(self.summary.get("steps", self.rows[-1]["step"] + 1 if self.rows else 0))

    def key(self, section: str, name: str, default: Any) -> Any:
        """Return a value of the configuration."""
        return self.config.get(section, {}).get(name, default)

    def of_kind(self, kind: str) -> list[LogEntry]:
        """Return the recorded steps or evaluations, in order."""
        return [m for m in self.moments if m.kind == kind]

    def groups(self, moment: LogEntry) -> pa.Table:
        """Return the groups of a moment (rollout_log.GROUPS). Raises UserError if the file is damaged."""
        if moment not in self._groups:
            self._groups[moment] = read_groups(self.folder / FOLDER, moment)
        return self._groups[moment]


def read_run(folder: Path) -> RecordedRun:
    """Read a run. Raises UserError if the folder contains no run, or if a file is damaged."""
    folder = folder.absolute()
    if not (folder / METRICS_FILE).is_file():
        raise UserError(f"{folder}: contains no {METRICS_FILE}; give the run.dir of a training run")
    record = run_info.read(folder)
    summary = folder / SUMMARY
    return RecordedRun(
        folder=folder,
        rows=list(read_metrics(folder / METRICS_FILE)),
        summary=read_object(summary, "delete it to report without it") if summary.exists() else {},
        config=record.get("config", {}),
        starts=record.get("starts", []),
        moments=entries(folder / FOLDER) if any((folder / FOLDER).glob("*.groups.parquet")) else [],
    )


def content(folders: Sequence[Path]) -> tuple[dict[str, Any], list[RecordedRun]]:
    """Return the content of a page without rollouts, and the runs. Raises UserError if a folder contains no run."""
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UserError("a run is given twice; give each run once")
    runs = [read_run(folder) for folder in folders]
    evaluated = [evaluations(run) for run in runs]
    several = len(runs) > 1
    contents = [_run(*arguments, several) for arguments in zip(_names(runs), runs, evaluated, strict=True)]
    data: dict[str, Any] = {"made": time.strftime("%Y-%m-%d %H:%M:%S %Z"), "runs": contents}
    data["meanings"] = meanings(sorted({name for run in contents for name in run["curves"]["values"]}))
    if several:
        last = [next((e for e in reversed(run_evaluations) if e.prompts), None) for run_evaluations in evaluated]
        data["against"] = [compared(last[0], e, _seed(runs[0])) if last[0] and e else None for e in last]
        data["time_to"] = times_to_target([run["checkpoints"] for run in contents])
    return data, runs


def _run(name: str, run: RecordedRun, evaluated: Sequence[RecordedEvaluation], several: bool) -> dict[str, Any]:
    """Return the content of one run. several: the page is a comparison, which does not show prompts."""
    changed = change(run, evaluated)
    shown = [e.as_dict() for e in evaluated]
    data: dict[str, Any] = {
        "name": name,
        "folder": str(run.folder),
        "n": run.summary.get("rollouts_per_prompt", run.key("rollout", "n", None)),
        "steps": run.steps,
        "seconds": run.summary.get("job_seconds"),
        "memory_mib": run.summary.get("peak_rss_mib"),
        "verdict": verdict(run.rows, run.summary, run.key("train", "steps", 0), shown, changed),
        "evaluations": shown,
        "change": changed,
        "curves": curves(run.rows),
        "checkpoints": checkpoints(run, evaluated),
        "generation": generation(run),
        "config": {f"{section}.{key}": value for section, keys in run.config.items() for key, value in keys.items()},
        "starts": run.starts,
    }
    if not several:
        data["by_task"] = by_task(run)
        data["spread"] = {kind: spread(run, kind) for kind in ("evaluation", "step")}
    return data


def meanings(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return unit, meaning and bad values of each documented metric of a step."""
    documented = {}
    for name in names:
        file = "time" if name.startswith("time/") else "step"
        if entry := metric_docs.find(name.removeprefix("time/"), file):
            documented[name] = {"unit": entry[1].unit, "meaning": entry[1].meaning, "bad": entry[1].bad}
    return documented


def _names(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the folder names, with as many parents as are needed to distinguish them."""
    for depth in range(1, max(len(run.folder.parts) for run in runs) + 1):
        names = ["/".join(run.folder.parts[-depth:]) for run in runs]
        if len(set(names)) == len(names):
            break
    return names


# Held-out evaluations: pass@k and mean reward with intervals, and their change.


@dataclass(frozen=True)
class PromptSamples:
    """The samples of a held-out prompt."""

    right: int
    samples: int  # without lost samples; at least 1
    task: str
    reward: float  # mean
    distinct: int  # answers


@dataclass(frozen=True)
class RecordedEvaluation:
    """One held-out evaluation."""

    steps: int  # finished before the evaluation
    prompts: Mapping[Key, PromptSamples]  # {} if the rollouts are not recorded
    passes: Mapping[int, Mapping[str, float]]  # k -> mean, and low and high if they are known
    tasks: Mapping[str, Mapping[str, float]]  # task -> pass@1: mean, low and high
    reward: Mapping[str, float] | None = None  # mean, low and high; None if the mean reward equals pass@1

    def as_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "prompts": len(self.prompts),
            "samples": max((a.samples for a in self.prompts.values()), default=None),
            "passes": [{"k": k, **self.passes[k]} for k in sorted(self.passes)],
            "tasks": dict(self.tasks),
            "reward": self.reward,
        }


def evaluations(run: RecordedRun) -> list[RecordedEvaluation]:
    """Return all evaluations in order, from recorded rollouts if possible, else from metrics.jsonl and summary.json."""
    by_steps = {e.steps: e for e in _from_summaries(run)}
    for moment in run.of_kind("evaluation"):
        seen: Counter[str] = Counter()
        prompts = {}
        for g in run.groups(moment).to_pylist():
            key = g["prompt_id"], seen[g["prompt_id"]]
            seen[g["prompt_id"]] += 1
            if g["rollouts"]:
                prompts[key] = PromptSamples(g["right"], g["rollouts"], g["task"] or "", g["reward"], g["distinct"])
        if prompts:
            by_steps[moment.number] = _computed(run, moment.number, prompts)
    return [by_steps[steps] for steps in sorted(by_steps)]


def _computed(run: RecordedRun, steps: int, prompts: Mapping[Key, PromptSamples]) -> RecordedEvaluation:
    """Return pass@k, pass@1 by task and the mean reward of these samples, with bootstrap intervals over prompts."""
    seed = _seed(run)
    samples = list(prompts.values())
    values_by_k = pass_at_each_k([(a.samples, a.right) for a in samples])
    passes = {k: bootstrap_mean(values, RESAMPLES, seed, SHARE).as_dict() for k, values in values_by_k.items()}

    # Recorded rewards are float32, so for rewards of 0 and 1 the means equal pass@1 up to rounding.
    same = all(abs(a.reward - a.right / a.samples) < 1e-6 for a in samples)
    reward = None if same else bootstrap_mean([a.reward for a in samples], RESAMPLES, seed).as_dict()
    tasks: dict[str, list[float]] = {}
    for a in samples:
        tasks.setdefault(a.task, []).append(a.right / a.samples)
    by_task = {name: bootstrap_mean(means, RESAMPLES, seed, SHARE).as_dict() for name, means in sorted(tasks.items())}
    return RecordedEvaluation(steps, prompts, passes, by_task, reward)


def _from_summaries(run: RecordedRun) -> list[RecordedEvaluation]:
    """Return the evaluations of metrics.jsonl and summary.json, whose prompts are unknown."""
    summaries: list[tuple[int, dict[int, Any], dict[str, Any], Mapping[str, float]]] = []
    for row in run.rows:
        if row.get("pass_at_1") is not None:
            names = {key.removeprefix("pass_at_"): v for key, v in row.items() if v is not None}
            passes = {int(k): {"mean": v} for k, v in names.items() if k.isdigit()}  # of the keys pass_at_{k}
            passes[1] = _interval(row, "pass_at_1")
            summaries.append((row["step"] + 1, passes, {}, _interval(row, "held_out_reward")))
    for name, steps in (("before", 0), ("after", run.steps)):
        if e := run.summary.get(name):
            passes = {int(k): {"mean": v} for k, v in e["pass_at_k"].items()} | {1: dict(e["pass_at_1"])}
            summaries.append((steps, passes, e.get("by_task", {}), e["mean_reward"]))
    return [
        RecordedEvaluation(steps, {}, passes, tasks, r if r and r["mean"] != passes[1]["mean"] else None)
        for steps, passes, tasks, r in summaries
    ]


def _interval(row: Row, name: str) -> dict[str, float]:
    keys = {"mean": name, "low": f"{name}_low", "high": f"{name}_high"}
    return {end: row[key] for end, key in keys.items() if row.get(key) is not None}


def change(run: RecordedRun, evaluated: Sequence[RecordedEvaluation]) -> dict[str, Any] | None:
    """Compare the last evaluation of a run with the first. Return None if they cannot be paired."""
    recorded = [e for e in evaluated if e.prompts]
    return compared(recorded[0], recorded[-1], _seed(run)) if len(recorded) > 1 else None


def change_of_run(folder: Path) -> dict[str, Any] | None:
    """Compare the evaluations before the first step and after the last one as `change` does."""
    run = read_run(folder)
    ends = [m for m in run.of_kind("evaluation") if m.number in (0, run.steps)]
    return change(run, evaluations(replace(run, moments=ends)))


def compared(before: RecordedEvaluation, after: RecordedEvaluation, seed: int) -> dict[str, Any] | None:
    """Compare two evaluations prompt by prompt; return None if they share fewer than two prompts.

    passes: for each k, the means before and after, and their difference with the 95% interval of the paired bootstrap
    and the two-tailed p-value of Student's t-test. tasks: the same for pass@1 of each task. reward: the same for the
    mean reward; None if it equals pass@1. distinct: mean distinct answers per prompt before and after; None if the
    numbers of samples differ. solved, lost: prompts with a right sample only in the second, or only in the first.
    """
    a = before.prompts
    b = after.prompts
    keys = [key for key in a if key in b]
    if len(keys) < 2:
        return None
    samples = min(min(a[k].samples, b[k].samples) for k in keys)
    passes = []
    for k in sorted(set(before.passes) & set(after.passes)):
        if k <= samples:
            one, two = ([pass_at_k(side[key].samples, side[key].right, k) for key in keys] for side in (a, b))
            passes.append({"k": k, **_paired(one, two, seed, SHARES)})
    first, last = ([side[key].reward for key in keys] for side in (a, b))
    same_counts = all(a[key].samples == b[key].samples for key in keys)
    tasks = []
    for task in sorted({b[key].task for key in keys}):
        one, two = ([side[key].right / side[key].samples for key in keys if b[key].task == task] for side in (a, b))
        if len(one) > 1:
            tasks.append({"task": task, "prompts": len(one), **_paired(one, two, seed, SHARES)})

    def moved(without: Mapping[Key, PromptSamples], having: Mapping[Key, PromptSamples]) -> list[dict[str, Any]]:
        moved_keys = [key for key in keys if without[key].right == 0 and having[key].right > 0]
        rows = [{"id": k[0], "right": having[k].right, "samples": having[k].samples} for k in moved_keys]
        return sorted(rows, key=lambda row: (-row["right"] / row["samples"], row["id"]))

    return {
        "from": before.steps,
        "to": after.steps,
        "prompts": len(keys),
        "samples": samples,
        "passes": passes,
        "reward": _paired(first, last, seed) if before.reward or after.reward else None,
        "distinct": [sum(side[key].distinct for key in keys) / len(keys) for side in (a, b)] if same_counts else None,
        "tasks": tasks,
        "solved": moved(a, b),
        "lost": moved(b, a),
    }


def _paired(one: list[float], two: list[float], seed: int, bounds: Bounds | None = None) -> dict[str, Any]:
    test = paired(one, two, RESAMPLES, seed, bounds)
    difference = {**test.difference.as_dict(), "p": test.two_tailed}
    return {"before": sum(one) / len(one), "after": sum(two) / len(two), "difference": difference}


def _seed(run: RecordedRun) -> int:
    """Return the bootstrap seed of the run, which gives the page the same intervals."""
    return int(run.key("run", "seed", 0))


# Time and rollouts of a run, and its generation speed.


def checkpoints(run: RecordedRun, evaluated: Sequence[RecordedEvaluation]) -> list[dict[str, Any]]:
    """Return a row per evaluation: steps, their seconds, rollouts sampled and trained on, pass@k, mean reward."""
    rows = []
    for e in evaluated:
        earlier = [row for row in run.rows if row["step"] < e.steps]
        rows.append(
            {
                "steps": e.steps,
                "seconds": sum(_time(row, "step") for row in earlier),
                "rollouts": sum(_number(row, "rollouts") for row in earlier),
                "kept": sum(_kept(row) for row in earlier),
                "passes": [{"k": k, **e.passes[k]} for k in sorted(e.passes)],
                "reward": (e.reward or e.passes[1]) if any(other.reward for other in evaluated) else None,
            }
        )
    return rows


def first_reached(xs: Sequence[float], ys: Sequence[float], target: float) -> float | None:
    """Return the first x at which a piecewise linear curve reaches `target`, or None."""
    end = next((i for i, y in enumerate(ys) if y >= target), None)
    if end is None:
        return None
    around = slice(max(end - 1, 0), end + 1)  # the points before and after the crossing
    return float(np.interp(target, ys[around], xs[around]))


def times_to_target(tables: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any] | None]:
    """Return, for the final pass@1 of each run, the seconds and rollouts at which every run first reached it.

    tables: checkpoints of each run. None stands for a run without an evaluation, or one that never reached the target.
    """
    targets: list[dict[str, Any] | None] = []
    for own_table in tables:
        if not own_table:
            targets.append(None)
            continue
        target = own_table[-1]["passes"][0]["mean"]
        runs = []
        for table in tables:
            accuracies = [row["passes"][0]["mean"] for row in table]
            spent = {x: first_reached([row[x] for row in table], accuracies, target) for x in ("seconds", "rollouts")}
            runs.append(spent if spent["seconds"] is not None else None)
        targets.append({"target": target, "runs": runs})
    return targets


def generation(run: RecordedRun) -> dict[str, Any] | None:
    """Return throughput per second of generation and per second of whole steps; None if no step has sampled anything.

    prompt_hits: share of prompt tokens that the engine found in its cache, averaged over rollouts.
    """
    rollouts = sum(_number(row, "rollouts") for row in run.rows)
    generate_s, step_s = (sum(_time(row, name) for row in run.rows) for name in ("generate", "step"))
    if not (rollouts and generate_s and step_s):
        return None
    tokens = sum(_number(row, "rollouts") * _number(row, "response_tokens") for row in run.rows)
    shares = [(_number(row, "rollouts"), (row.get("time") or {}).get("kv_cache/prompt_hits")) for row in run.rows]
    hits = [(n, x) for n, x in shares if n and x is not None]
    return {
        "rollouts_per_s": rollouts / generate_s,
        "tokens_per_s": tokens / generate_s,
        "share_of_step": generate_s / step_s,
        "end_to_end_per_s": rollouts / step_s,
        "kept_per_s": sum(map(_kept, run.rows)) / step_s,
        "prompt_hits": sum(n * x for n, x in hits) / sum(n for n, _ in hits) if hits else None,
    }


def _time(row: Row, name: str) -> float:
    return float((row.get("time") or {}).get(name) or 0.0)


def _number(row: Row, name: str) -> float:
    return float(row.get(name) or 0.0)


def _kept(row: Row) -> float:
    return _number(row, "rollouts") * _number(row, "kept_share")


# Curves over steps, and histograms over prompts.


def curves(rows: Sequence[Row], most: int = MAX_POINTS) -> dict[str, Any]:
    """Return every metric of metrics.jsonl, at most `most` points of each.

    every: steps per point. step: the last step of each point, from 1. elapsed: seconds of all steps up to there.
    values: by name, with the prefix "time/" for times; None where a metric is missing. Values have seven digits.
    """
    every = max(1, math.ceil(len(rows) / most))
    parts = [rows[i : i + every] for i in range(0, len(rows), every)]
    flat = [[_flat(row) for row in part] for part in parts]
    names = dict.fromkeys(name for part in flat for row in part for name in row)
    values = {name: [_mean([row.get(name) for row in part]) for part in flat] for name in names}
    seconds = itertools.accumulate(sum(row.get("time/step") or 0.0 for row in part) for part in flat)
    return {
        "every": every,
        "step": [part[-1]["step"] + 1 for part in parts],
        "elapsed": [float(f"{s:.7g}") for s in seconds],
        "values": {name: column for name, column in values.items() if any(v is not None for v in column)},
    }


def by_task(run: RecordedRun) -> dict[str, Any]:
    """Return the mean distinct answers and the share right by task, over the groups of each recorded step."""
    recorded = run.of_kind("step")
    count = min(len(recorded), MAX_MOMENTS)
    steps = [recorded[i] for i in np.linspace(0, len(recorded) - 1, count).round().astype(int)]
    shares_of_step: list[dict[str, list[float]]] = []
    distinct: list[float | None] = []
    for moment in steps:
        rows = run.groups(moment).select(["task", "right", "rollouts", "distinct"]).to_pylist()
        shares: dict[str, list[float]] = {}
        for g in (g for g in rows if g["rollouts"]):
            shares.setdefault(g["task"] or "", []).append(g["right"] / g["rollouts"])
        shares_of_step.append(shares)
        distinct.append(_mean([g["distinct"] for g in rows if g["rollouts"]]))
    names = sorted({name for shares in shares_of_step for name in shares})
    return {
        "step": [m.shown for m in steps],
        "distinct": distinct,
        "tasks": {name: [_mean(shares.get(name, [])) for shares in shares_of_step] for name in names},
    }


def spread(run: RecordedRun, kind: str) -> dict[str, Any] | None:
    """Return histograms of right rollouts per prompt at the first and the last moment, or None without moments.

    If all prompts have the same small number of samples (`of`), bins are numbers of right samples, else tenths.
    """
    ends = dict.fromkeys([*run.of_kind(kind)[:1], *run.of_kind(kind)[-1:]])
    recorded = []
    for moment in ends:
        groups = run.groups(moment)
        pairs = zip(groups["right"].to_pylist(), groups["rollouts"].to_pylist(), strict=True)
        if known := [(right, n) for right, n in pairs if n]:
            recorded.append((moment, known))
    if not recorded:
        return None
    sizes = {n for _, known in recorded for _, n in known}
    common_size = sizes.pop() if len(sizes) == 1 and max(sizes) <= MAX_COUNTED_SAMPLES else 0
    bins = [str(i) for i in range(common_size + 1)] if common_size else TENTHS
    counts = []
    for _, known in recorded:
        counter = Counter(right if common_size else _tenth(right, n) for right, n in known)
        counts.append([counter[i] for i in range(len(bins))])
    return {"of": common_size or None, "bins": bins, "numbers": [m.shown for m, _ in recorded], "counts": counts}


def _tenth(right: int, n: int) -> int:
    """Return the index in TENTHS. A share on a bound belongs to the tenth above it."""
    return 0 if not right else len(TENTHS) - 1 if right == n else 1 + (10 * right) // n


def _flat(row: Row) -> dict[str, Any]:
    numbers = {key: value for key, value in row.items() if key != "step" and isinstance(value, (int, float))}
    return numbers | {f"time/{key}": value for key, value in (row.get("time") or {}).items()}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return float(f"{sum(known) / len(known):.7g}") if known else None
