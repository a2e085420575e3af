"""A run's held-out evaluations: pass@1 and pass@k with intervals, and what changed from the first to the last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_brorl.algo.estimators import bootstrap_mean, pass_at_k
from megatron_brorl.algo.paired import paired
from megatron_brorl.report.run_files import RunFiles

RESAMPLES = 2000  # where the configuration is not recorded; evaluate.bootstrap otherwise

Key = tuple[str, int]  # id of a prompt, and the how manieth of this id it is


@dataclass(frozen=True)
class Asked:
    """What became of a held-out prompt's samples."""

    right: int
    samples: int  # that were not lost; at least 1
    task: str


@dataclass(frozen=True)
class Evaluation:
    """One evaluation."""

    steps: int  # done before it
    prompts: Mapping[Key, Asked]  # {}: its rollouts are not recorded
    passes: Mapping[int, Mapping[str, float]]  # k -> mean, and low and high where they are known
    tasks: Mapping[str, float]  # pass@1 by task

    def as_dict(self) -> dict[str, Any]:
        """For the page."""
        return {
            "steps": self.steps,
            "prompts": len(self.prompts),
            "samples": max((a.samples for a in self.prompts.values()), default=None),
            "passes": [{"k": k, **self.passes[k]} for k in sorted(self.passes)],
            "tasks": dict(self.tasks),
        }


def evaluations(run: RunFiles) -> list[Evaluation]:
    """Every evaluation in order: of its recorded rollouts, else what metrics.jsonl and summary.json say of it."""
    found = {e.steps: e for e in _told(run)}
    for moment in run.of_kind("evaluation"):
        prompts = _asked(run.groups(moment).to_pylist())
        if prompts:
            found[moment.number] = _computed(run, moment.number, prompts)
    return [found[steps] for steps in sorted(found)]


def change(run: RunFiles, found: Sequence[Evaluation]) -> dict[str, Any] | None:
    """From the first to the last evaluation of a run, as `compared`; None where they cannot be paired."""
    recorded = [e for e in found if e.prompts]
    return compared(recorded[0], recorded[-1], *_bootstrap(run)) if len(recorded) > 1 else None


def against(runs: Sequence[RunFiles], found: Sequence[Sequence[Evaluation]]) -> list[dict[str, Any] | None]:
    """The last evaluation of each run against that of the first one, as `compared`; None where they have no pairs."""
    last = [next((e for e in reversed(own) if e.prompts), None) for own in found]
    first = last[0]
    return [compared(first, e, *_bootstrap(runs[0])) if first and e else None for e in last]


def compared(before: Evaluation, after: Evaluation, resamples: int, seed: int) -> dict[str, Any] | None:
    """Two evaluations prompt by prompt; None where they share fewer than two prompts.

    passes: k, means before and after, their difference with its 95% interval of the paired bootstrap, and Student's
    two-tailed p. solved, lost: prompts with a right sample in the second one alone, and in the first one alone.
    """
    # What both were asked: a pair needs both sides.
    a, b = before.prompts, after.prompts
    keys = [key for key in a if key in b]
    if len(keys) < 2:
        return None  # one difference has no spread

    # pass@k for every k that each pair has samples for.
    most = min(min(a[k].samples, b[k].samples) for k in keys)
    passes = []
    for k in sorted(set(before.passes) & set(after.passes)):
        if k <= most:
            # Entry i of either is of keys[i]: that is what pairs them.
            one, two = ([pass_at_k(side[key].samples, side[key].right, k) for key in keys] for side in (a, b))
            test = paired(one, two, resamples, seed)
            means = {"before": sum(one) / len(keys), "after": sum(two) / len(keys)}
            passes.append({"k": k, **means, "difference": {**test.difference.as_dict(), "p": test.two_tailed}})

    # Prompts that one of the two has no right sample of.
    def moved(lacks: Mapping[Key, Asked], has: Mapping[Key, Asked]) -> list[dict[str, Any]]:
        own = [key for key in keys if lacks[key].right == 0 < has[key].right]
        rows = [{"id": k[0], "task": has[k].task, "right": has[k].right, "samples": has[k].samples} for k in own]
        # The surest first.
        return sorted(rows, key=lambda row: (-row["right"] / row["samples"], row["id"]))

    return {
        # Steps that were done before each.
        "from": before.steps,
        "to": after.steps,
        "prompts": len(keys),
        "samples": most,
        "passes": passes,
        "solved": moved(a, b),
        "lost": moved(b, a),
    }


def _bootstrap(run: RunFiles) -> tuple[int, int]:
    """Resamples and seed of the run's own intervals, so that the page's are the same."""
    return int(run.key("evaluate", "bootstrap", RESAMPLES)), int(run.key("run", "seed", 0))


def _asked(groups: list[Mapping[str, Any]]) -> dict[Key, Asked]:
    times: Counter[str] = Counter()
    found = {}
    for g in groups:
        key = g["prompt_id"], times[g["prompt_id"]]
        times[g["prompt_id"]] += 1
        if g["rollouts"]:  # not all of its samples were lost
            found[key] = Asked(g["right"], g["rollouts"], g["verifier"] or "")
    return found


def _computed(run: RunFiles, steps: int, prompts: Mapping[Key, Asked]) -> Evaluation:
    """As train.evaluate sums up: a prompt with fewer than k samples is left out of pass@k."""
    resamples, seed = _bootstrap(run)
    ks = run.key("evaluate", "pass_at", ()) or _powers(max(a.samples for a in prompts.values()))
    passes = {}
    for k in sorted({1, *ks}):
        values = [pass_at_k(a.samples, a.right, k) for a in prompts.values() if a.samples >= k]
        if values:
            passes[k] = bootstrap_mean(values, resamples, seed).as_dict()

    # A task's prompts count alike.
    tasks: dict[str, list[float]] = {}
    for a in prompts.values():
        tasks.setdefault(a.task, []).append(a.right / a.samples)
    return Evaluation(steps, prompts, passes, {name: sum(v) / len(v) for name, v in sorted(tasks.items())})


def _told(run: RunFiles) -> list[Evaluation]:
    """Without intervals of pass@k, for nobody has recorded them."""
    found = []
    for row in run.rows:
        if row.get("pass_at_1") is not None:
            names = {key.removeprefix("pass_at_"): value for key, value in row.items() if key.startswith("pass_at_")}
            ends = {end: names[f"1_{end}"] for end in ("low", "high") if names.get(f"1_{end}") is not None}
            passes = {int(k): {"mean": v} for k, v in names.items() if k.isdigit() and v is not None}
            passes[1] |= ends
            found.append(Evaluation(row["step"] + 1, {}, passes, {}))

    # Before and after stand in the summary.
    for name, steps in (("before", 0), ("after", run.steps)):
        e = run.summary.get(name)
        if e:
            passes = {int(k): {"mean": v} for k, v in e["pass_at_k"].items()} | {1: dict(e["pass_at_1"])}
            found.append(Evaluation(steps, {}, passes, e.get("by_task", {})))
    return found


def _powers(samples: int) -> list[int]:
    """1, 2, 4, ... up to samples, which is always the last."""
    return [*(2**i for i in range(samples.bit_length()) if 2**i < samples), samples]
