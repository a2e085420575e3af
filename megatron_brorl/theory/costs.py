"""What a step costs in time, from measured phases; and the arithmetic of published runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_brorl.errors import UserError
from megatron_brorl.metrics import read_metrics


@dataclass(frozen=True)
class Costs:
    """Time of the parts of a step. Without measured times the unit is one generated rollout."""

    prefill: float  # per prompt
    decode: float  # per generated rollout, its verdict included
    train: float  # per rollout that is trained on
    fixed: float = 0.0  # per step
    unit: str = "s"

    def step(self, prompts: float, n: int, kept_share: float) -> float:
        """Time of a step that trains on `prompts` kept prompts with n rollouts each; inf if none is ever kept.

        Dynamic sampling generates prompts / kept_share groups for that.
        """
        if kept_share <= 0:
            return float("inf")
        return self.fixed + prompts / kept_share * (self.prefill + n * self.decode) + prompts * n * self.train

    def prompt(self, n: int, kept_share: float) -> float:
        """Mean time per generated prompt, training on the kept ones included; without the fixed part."""
        return self.prefill + n * (self.decode + kept_share * self.train)


UNMEASURED = Costs(prefill=0.0, decode=1.0, train=0.0, unit="rollouts")


def generated(prompts: float, n: int, kept_share: float) -> float:
    """Rollouts that a step generates to keep `prompts` prompts: prompts * n / kept_share."""
    return prompts * n / kept_share


@dataclass(frozen=True)
class Rates:
    """What a run's steps, samples and hours amount to."""

    kept_share: float
    generated_per_second: float
    kept_per_second: float
    seconds_per_step: float


def rates(steps: int, prompts: int, n: int, samples: float, seconds: float) -> Rates:
    """From steps with `prompts` kept prompts and n rollouts each, all samples generated, and the wall-clock time."""
    kept = steps * prompts * n
    return Rates(kept / samples, samples / seconds, kept / seconds, seconds / steps)


def learning_rate_factor(samples: float, samples_before: float) -> float:
    """sqrt(B / B_0): how BroRL scales the learning rate with the samples per step (Krizhevsky 2014)."""
    return float((samples / samples_before) ** 0.5)


def read_costs(runs: Sequence[Path]) -> tuple[Costs, str]:
    """Costs from the metrics.jsonl and summary.json of finished runs, and a sentence on how they were found.

    Runs with different N separate the cost of a prompt from that of a rollout (least squares over the medians of the
    runs); one run alone counts all of its generation as rollouts.
    """
    points, train, fixed = [], [], []
    for run in runs:
        # Of each run: the steps that have times.
        rows = read_metrics(run / "metrics.jsonl")
        n = _rollouts_per_prompt(run / "summary.json")
        times = [(row, row["time"]) for row in rows if row.get("time") and row.get("rollouts")]
        if not times or any(key not in t for _, t in times for key in ("generate", "score", "train", "step")):
            raise UserError(f"{run}: metrics.jsonl holds no times of generate, score, train and step")

        # Generation per prompt of n rollouts, training per rollout that was kept, and the rest of a step.
        points.append((n, float(np.median([(t["generate"] + t["score"]) * n / row["rollouts"] for row, t in times]))))
        kept = sum(row["rollouts"] * row["kept_share"] for row, _ in times)  # rollouts
        if kept > 0:
            train.append(sum(t["train"] for _, t in times) / kept)
        # What a step takes beside its phases.
        fixed.append(np.median([t["step"] - t["generate"] - t["score"] - t["train"] for _, t in times]))

    if not train:
        raise UserError(f"{runs[0]}: no step kept a prompt, so the cost of training is unknown; give --train")

    # One N: all of generation counts as rollouts. Several: a line over N, where it rises.
    n, seconds = np.array(points).T
    prefill, decode = 0.0, float(np.mean(seconds / n))
    how = "one N measured: the prompt's own share of generation is counted with its rollouts"
    if len(set(n)) > 1:
        slope, start = np.polyfit(n, seconds, 1)  # per rollout, per prompt
        how = "prompt and rollouts separated over runs with different N"
        if start >= 0 and slope > 0:
            prefill, decode = float(start), float(slope)
        else:
            how = "generation grows no slower than N in these runs: all of it is counted with the rollouts"

    # What is left beside the phases may come out below 0; a cost may not.
    return Costs(prefill, decode, float(np.mean(train)), max(0.0, float(np.mean(fixed)))), how


def _rollouts_per_prompt(path: Path) -> int:
    try:
        n = json.loads(path.read_text(encoding="utf-8"))["rollouts_per_prompt"]
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror}; give the folder of a finished run") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f'{path}: holds no "rollouts_per_prompt"; give the folder of a finished run') from None
    return int(n)
