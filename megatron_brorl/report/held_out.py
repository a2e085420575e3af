"""A run's held-out evaluations: pass@k and mean reward with intervals, and what changed from the first to the last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_brorl.algo.estimators import SHARE, Bounds, bootstrap_mean, pass_at_k
from megatron_brorl.algo.paired import SHARES, paired
from megatron_brorl.report.run_files import RunFiles

RESAMPLES = 2000  # where the configuration is not recorded; evaluate.bootstrap otherwise

Key = tuple[str, int]  # id of a prompt, and the how manieth of this id it is


@dataclass(frozen=True)
class Asked:
    """What became of a held-out prompt's samples."""

    right: int
    samples: int  # that were not lost; at least 1
    task: str
    reward: float  # mean


@dataclass(frozen=True)
class Evaluation:
    """One evaluation."""

    steps: int  # done before it
    prompts: Mapping[Key, Asked]  # {}: its rollouts are not recorded
    passes: Mapping[int, Mapping[str, float]]  # k -> mean, and low and high where they are known
    tasks: Mapping[str, float]  # pass@1 by task
    reward: Mapping[str, float] | None = None  # mean, low and high of the mean reward; None: it is pass@1

    def as_dict(self) -> dict[str, Any]:
        """For the page."""
        return {
            "steps": self.steps,
            "prompts": len(self.prompts),
            "samples": max((a.samples for a in self.prompts.values()), default=None),
            "passes": [{"k": k, **self.passes[k]} for k in sorted(self.passes)],
            "tasks": dict(self.tasks),
            "reward": self.reward,
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
    two-tailed p. reward: the same of the mean reward, None where that is pass@1. solved, lost: prompts with a right
    sample in the second one alone, and in the first one alone.
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
            passes.append({"k": k, **_paired(one, two, resamples, seed, SHARES)})
    # Means of rewards pair by the same keys.
    first, last = ([side[key].reward for key in keys] for side in (a, b))

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
        # Where neither evaluation had partial credit, it is pass@1 once more.
        "reward": _paired(first, last, resamples, seed) if before.reward or after.reward else None,
        "solved": moved(a, b),
        "lost": moved(b, a),
    }


def _paired(
    one: list[float], two: list[float], resamples: int, seed: int, bounds: Bounds | None = None
) -> dict[str, Any]:
    """Both means, and their difference with its interval and p; one value per prompt each."""
    test = paired(one, two, resamples, seed, bounds)
    difference = {**test.difference.as_dict(), "p": test.two_tailed}
    return {"before": sum(one) / len(one), "after": sum(two) / len(two), "difference": difference}


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
            found[key] = Asked(g["right"], g["rollouts"], g["verifier"] or "", g["reward"])
    return found


def _computed(run: RunFiles, steps: int, prompts: Mapping[Key, Asked]) -> Evaluation:
    """As train.evaluate sums up: a prompt with fewer than k samples is left out of pass@k."""
    resamples, seed = _bootstrap(run)
    ks = run.key("evaluate", "pass_at", ()) or _powers(max(a.samples for a in prompts.values()))
    passes = {}
    for k in sorted({1, *ks}):
        values = [pass_at_k(a.samples, a.right, k) for a in prompts.values() if a.samples >= k]
        if values:
            passes[k] = bootstrap_mean(values, resamples, seed, SHARE).as_dict()

    # Recorded rewards are float32: for rewards of 0 and 1 their means are pass@1 up to rounding.
    asked = list(prompts.values())
    same = all(abs(a.reward - a.right / a.samples) < 1e-6 for a in asked)
    reward = None if same else bootstrap_mean([a.reward for a in asked], resamples, seed).as_dict()

    # A task's prompts count alike.
    tasks: dict[str, list[float]] = {}
    for a in prompts.values():
        tasks.setdefault(a.task, []).append(a.right / a.samples)
    return Evaluation(steps, prompts, passes, {name: sum(v) / len(v) for name, v in sorted(tasks.items())}, reward)


def _told(run: RunFiles) -> list[Evaluation]:
    """Without intervals of pass@k, for nobody has recorded them."""
    found = []
    for row in run.rows:
        if row.get("pass_at_1") is not None:
            names = {key.removeprefix("pass_at_"): value for key, value in row.items() if key.startswith("pass_at_")}
            ends = {end: names[f"1_{end}"] for end in ("low", "high") if names.get(f"1_{end}") is not None}
            passes = {int(k): {"mean": v} for k, v in names.items() if k.isdigit() and v is not None}
            passes[1] |= ends
            ends = {"mean": "held_out_reward", "low": "held_out_reward_low", "high": "held_out_reward_high"}
            reward = {end: row[name] for end, name in ends.items() if row.get(name) is not None}
            found.append(Evaluation(row["step"] + 1, {}, passes, {}, _other(reward, passes[1])))

    # Before and after stand in the summary.
    for name, steps in (("before", 0), ("after", run.steps)):
        e = run.summary.get(name)
        if e:
            passes = {int(k): {"mean": v} for k, v in e["pass_at_k"].items()} | {1: dict(e["pass_at_1"])}
            found.append(Evaluation(steps, {}, passes, e.get("by_task", {}), _other(e["mean_reward"], passes[1])))
    return found


def _other(reward: Mapping[str, float], pass_at_1: Mapping[str, float]) -> Mapping[str, float] | None:
    """The mean reward where it is known and is not pass@1."""
    return reward if reward and reward["mean"] != pass_at_1["mean"] else None


def _powers(samples: int) -> list[int]:
    """1, 2, 4, ... up to samples, which is always the last."""
    return [*(2**i for i in range(samples.bit_length()) if 2**i < samples), samples]
