"""Does the predicted change of the success rate agree with the measured one? Correlations over a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_brorl.algo.estimators import Interval, bootstrap_mean

Floats = npt.NDArray[np.float64]

PREDICTIONS = ("theorem", "policy_gradient", "answers", "spread")  # the last is the null, s (1 - s)
RESAMPLES = 2000

_LABELS = {"spread": "s (1 - s), the null that the others have to beat"}  # for people


def correlation(x: Floats, y: Floats) -> float:
    """Pearson's correlation; nan for fewer than three pairs, or where either does not vary."""
    if len(x) < 3 or x.std() == 0 or y.std() == 0:
        return math.nan
    return float(np.clip(((x - x.mean()) * (y - y.mean())).mean() / (x.std() * y.std()), -1, 1))


def fisher_interval(r: float, pairs: int) -> Interval | None:
    """r with its 95% interval tanh(artanh r -+ 1.96 / sqrt(pairs - 3)) (Fisher 1921), for independent normal pairs.

    None where r is nan, there are fewer than four pairs, or r is 1 or -1 (the interval would be that point).
    """
    if math.isnan(r) or pairs < 4 or abs(r) == 1:
        return None
    z, half = math.atanh(r), 1.959964 / math.sqrt(pairs - 3)
    return Interval(r, math.tanh(z - half), math.tanh(z + half))


def agreement(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What the lines of a metrics.jsonl say of prediction and measurement; None where no step was measured.

    For each prediction: over_steps, the correlation of predicted and measured change over steps; over_prompts, the mean
    over steps of the correlation over the prompts of a step, with a bootstrap interval over steps; same_sign, the share
    of steps whose two changes have one sign.
    """
    # A run without theory.measure_every has nothing to compare.
    measured = [row for row in rows if row.get("theory_measured/change") is not None]
    if not measured:
        return None

    changes = np.array([row["theory_measured/change"] for row in measured])  # measured, [steps]
    found: dict[str, Any] = {"steps": len(measured), "change": float(changes.mean()), "predictions": {}}

    # Each prediction, at the steps that have it.
    for name in PREDICTIONS:
        known = np.array([row.get(f"theory_predicted/{name}") is not None for row in measured])  # [steps] bool
        if not known.any():
            continue
        x = np.array([row[f"theory_predicted/{name}"] for row, ok in zip(measured, known, strict=True) if ok])
        y = changes[known]  # measured at the same steps

        # Over the steps of the run, and over the prompts of each step.
        over_steps = fisher_interval(correlation(x, y), len(x))
        within = [r for row in measured if (r := row.get(f"theory_measured/over_prompts_{name}")) is not None]
        over_prompts = bootstrap_mean(within, RESAMPLES, 0) if within else None

        found["predictions"][name] = {
            "over_steps": over_steps.as_dict() if over_steps else None,
            "over_prompts": over_prompts.as_dict() if over_prompts else None,
            "same_sign": float((np.sign(x) == np.sign(y)).mean()),
        }

    return found


def agreement_lines(found: Mapping[str, Any]) -> list[str]:
    """The same for people, a line each."""

    def text(interval: Mapping[str, float] | None) -> str:
        return "unknown" if interval is None else "{mean:.2f} ({low:.2f} to {high:.2f})".format(**interval)

    return [
        f"measured change of pass@1 per update on its own prompts, mean over {found['steps']} steps: "
        f"{found['change']:+.4f}",
        *(
            f"predicted by {_LABELS.get(name, name)}: correlation over steps {text(p['over_steps'])}, "
            f"over prompts of a step {text(p['over_prompts'])}, same sign {p['same_sign']:.0%}"
            for name, p in found["predictions"].items()
        ),
    ]
