"""Writes a run.dir like that of `brorl train`, for tests of the report."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from megatron_brorl import rollout_log
from megatron_brorl.rollout_log import GROUPS, ROLLOUTS, LogEntry
from megatron_brorl.tracking.metrics import MetricsWriter

TASKS = ("gcd", "spell_backward")
HOSTILE = (
    '</script><img src=x onerror="window.broken=1"><script>window.broken=1</script><!-- \u202e & \U0001f600 {{7*7}}'
)


def make_run(
    folder: Path,
    prompts: int = 12,
    samples: int = 4,
    evaluations: tuple[int, ...] = (0, 2, 4),
    steps: int = 4,
    n: int = 32,
    rates: tuple[float, float] = (0.3, 0.6),
    rewards: tuple[float, float] | None = None,
    rights: tuple[list[int], list[int]] | None = None,
    ended: bool = True,
    record_rollouts: bool = True,
    write_run_json: bool = True,
) -> Path:
    """Write a run.

    rates: shares of right answers at the first and the last evaluation. Steps have shares between these. rewards: mean
    rewards of these evaluations if they differ from the rates. rights: right samples of each prompt at the first and at
    later evaluations, instead of the rates.

    ended: write summary.json, as a run does at its end.
    """
    random = np.random.default_rng(3)
    last = max([*evaluations, steps, 1])

    def rate(step: float) -> float:
        return rates[0] + (rates[1] - rates[0]) * step / last

    # Evaluations have held-out prompts. Each step has 6 of 8 training prompts, so that these repeat.
    shares = {}
    for number in evaluations:
        right = np.array(rights[number > 0]) if rights else random.binomial(samples, rate(number), prompts)
        shares[number] = float(right.mean() / samples)
        if record_rollouts:
            names = [f"held/{i} & <b>" for i in range(prompts)]
            mean = rewards and rewards[0] + (rewards[1] - rewards[0]) * number / last
            _write(folder, LogEntry("evaluation", number), names, right, n=samples, mean_reward=mean)
    with closing(MetricsWriter(folder)) as writer:
        for step in range(steps):
            right = random.binomial(n, rate(step), 6)
            names = [f"train/{(step + i) % 8}" for i in range(6)]
            if record_rollouts:
                _write(folder, LogEntry("step", step), names, right, n=n, recorded_siblings=8, recorded_groups=2)
            writer.write(step, _metrics(step, right, n, shares.get(step + 1)), _seconds(step))

    if ended:
        (folder / "summary.json").write_text(json.dumps(_summary(shares, prompts, steps, n)))
    if write_run_json:
        config = {"run": {"seed": 7}, "rollout": {"n": n}, "train": {"steps": steps}}
        command = "brorl train --processes 2 run.toml"
        start = {"time": "2026-11-23T02:00:00+0000", "step": 0, "ranks": 2, "command": command}
        start |= {"machine": {"system": "Linux", "cores": 2, "device": "no GPU"}, "versions": {"torch": "2.13.0"}}
        (folder / "run.json").write_text(json.dumps({"config": config, "starts": [start]}))
    return folder


def rollout(group: int, prompt: str, sibling: int, answer: str | None, right: bool, **changes: Any) -> dict[str, Any]:
    """Return a row of rollout_log.ROLLOUTS. changes: columns that differ."""
    return {
        "group": group,
        "prompt_id": prompt,
        "sibling": sibling,
        "text": f"it is {answer}",
        "answer": answer,
        "reward": float(right),
        "right": right,
        "score": float(right),
        "parts": [("form", 0.5)],
        "reason": "right" if right else f"{answer} is not it",
        "status": "ok" if answer else "no_answer",
        "finish": "stop",
        "tokens": 3,
        "versions": [{"version": 4, "tokens": 3}],
        "advantage": None,
        "token_ids": [5, 6, 2],
        "sampled": None,
        "turns": None,
        "log_probs": [-1.5, -0.25, 0.0],
        **changes,
    }


def group(number: int, rollouts: list[dict[str, Any]], recorded: int, **changes: Any) -> dict[str, Any]:
    """Return a row of rollout_log.GROUPS. recorded: number of recorded rollouts. changes: columns that differ."""
    right = sum(r["right"] for r in rollouts)
    n = len(rollouts)
    prompt = rollouts[0]["prompt_id"]
    return {
        "group": number,
        "prompt_id": prompt,
        "task": "exact",
        "rollouts": n,
        "right": right,
        "distinct": len({r["answer"] for r in rollouts}),
        "reward": right / n,
        "tokens": 3.0,
        "outcome": {0: "wrong", n: "right"}.get(right, "mixed"),
        "trained": 0 < right < n,
        "recorded": recorded,
        "prompt": f"what is\n{prompt}?" if recorded else None,
        "reference": "7" if recorded else None,
        **changes,
    }


def _write(
    folder: Path,
    moment: LogEntry,
    names: list[str],
    rights: Any,
    n: int,
    recorded_siblings: int | None = None,
    recorded_groups: int | None = None,
    mean_reward: float | None = None,
) -> None:
    """Write a moment with the first `recorded_siblings` rollouts of the first `recorded_groups` groups; None: all."""
    groups = []
    rollouts = []
    for g, (name, right) in enumerate(zip(names, rights.tolist(), strict=True)):
        siblings = [_rollout(g, name, i, 5 * i % n < right, moment) for i in range(n)]  # right siblings are spread
        recorded = len(siblings[:recorded_siblings]) if recorded_groups is None or g < recorded_groups else 0
        rollouts += siblings[:recorded]
        reward = right / n if mean_reward is None else mean_reward + 0.1 * (-1) ** g  # +0.1 and -0.1 cancel in the mean
        trained = moment.kind == "step" and 0 < right < n
        groups.append(group(g, siblings, recorded, task=TASKS[g % 2], reward=reward, trained=trained))
    rollout_log.write_groups(folder / "rollouts", moment, pa.Table.from_pylist(groups, GROUPS))
    rollout_log.write_rollouts(folder / "rollouts", moment, 0, pa.Table.from_pylist(rollouts, ROLLOUTS))


def _rollout(number: int, name: str, sibling: int, right: bool, moment: LogEntry) -> dict[str, Any]:
    answer = "7" if right else f"{sibling % 3}" if sibling % 4 else None
    advantage = None if moment.kind == "evaluation" else (0.8 if right else -0.4) / (number + 1)
    text = f"\U0001f600 it is {answer}" if sibling % 2 else f"{HOSTILE} {answer}"
    reason = "right" if right else f"{answer} is <i>not</i> it"
    parts = (text, True, 0), (HOSTILE, False, sibling % 2)
    turns = [dict(zip(("text", "sampled", "sequence"), part, strict=True)) for part in parts] if sibling % 3 else None
    return rollout(number, name, sibling, answer, right, text=text, reason=reason, advantage=advantage, turns=turns)


def _metrics(step: int, rights: Any, n: int, pass_at_1: float | None) -> dict[str, float]:
    names = ("pass_at_1", "held_out_reward")
    ends = (("", pass_at_1), ("_low", 0.0), ("_high", 1.0))
    held_out = {f"{name}{end}": value for name in names for end, value in ends if pass_at_1 is not None}
    unknown = float("nan")
    good_turing = {"distinct": 4.0, "singletons": 1.0, "unseen_mass": 0.05, "unseen_right": 0.01}
    good_turing |= {"low": 0.0, "high": 0.2} if step else {"low": unknown, "high": unknown}
    unsampled = {"unsampled_mass_2": 0.05, "unsampled_mass_2_low": 0.03, "unsampled_mass_2_high": 0.08}
    mean = float(rights.mean() / n)
    return {
        "rollouts": float(n * len(rights)),
        "reward": mean,
        "reward_std": (mean * (1 - mean)) ** 0.5,
        "kept_share": float(((rights > 0) & (rights < n)).mean()),
        "all_right_share": float((rights == n).mean()),
        "all_wrong_share": float((rights == 0).mean()),
        "answered_share": 0.75,
        "cut_off_share": 0.0,
        "response_tokens": 3.0 + step,
        "logprob_gap_max": 1e-6 * (step + 1),
        "logprob_gap_mean": 1e-7,
        "entropy": 1.0 / (step + 1),
        "grad_norm": unknown if step == 1 else 0.5,
        **{f"theory_good_turing/{name}": value for name, value in good_turing.items()},
        **{f"theory_hold_out/{name}": value for name, value in unsampled.items()},
        **held_out,
    }


def _seconds(step: int) -> dict[str, float]:
    seconds = {"generate": 2.0, "score": 0.25, "exchange": 0.25, "train": 1.0 + step, "weight_sync": 0.5}
    return {**seconds, "step": 5.0 + step}


def _summary(shares: dict[int, float], prompts: int, steps: int, n: int) -> dict[str, Any]:
    def evaluation(number: int) -> dict[str, Any] | None:
        if number not in shares:
            return None
        mean = {"mean": shares[number], "low": 0.0, "high": 1.0}
        pass_at_k = {"1": shares[number]}
        return {"pass_at_1": mean, "mean_reward": mean, "pass_at_k": pass_at_k, "by_task": {}, "prompts": prompts}

    both = {"before": evaluation(0), "after": evaluation(max(shares, default=-1)) if len(shares) > 1 else None}
    means = {f"{name}_{when}": e and e[name] for when, e in both.items() for name in ("pass_at_1", "mean_reward")}
    sizes = {"held_out_prompts": prompts, "rollouts_per_prompt": n, "steps": steps}
    return {**both, **means, **sizes, "job_seconds": 60.0, "peak_rss_mib": 100.0, "findings": {}}
