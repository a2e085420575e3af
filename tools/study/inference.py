"""What differences between arms say where the unit is the warm start: paired t-intervals, Holm, a mixed model."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_brorl.algo.paired import student_tail


@dataclass(frozen=True)
class PairedT:
    """Student's paired test, two-sided, and its interval."""

    mean: float
    low: float
    high: float
    t: float
    degrees: int
    p: float


@dataclass(frozen=True)
class Effect:
    """An arm's difference to the first arm, and its 95% interval by the normal distribution."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class MixedFit:
    """share right ~ arm + (1 | warm start) + (1 | run) + (1 | prompt), runs and prompts crossed within a warm start."""

    effects: dict[str, Effect]  # by arm, without the first
    variances: dict[str, float]  # "warm start", "run", "prompt", "residual"
    converged: bool


@functools.lru_cache
def student_quantile(p: float, degrees: int) -> float:
    """t with P(T <= t) = p in (0, 1), by bisection of student_tail to 64 bits."""
    if p < 0.5:
        return -student_quantile(1 - p, degrees)
    low, high = 0.0, 1.0
    while student_tail(high, degrees) > 1 - p:
        high *= 2
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (middle, high) if student_tail(middle, degrees) > 1 - p else (low, middle)
    return (low + high) / 2


def paired_t(differences: Sequence[float], level: float = 0.05) -> PairedT:
    """Of one difference per warm start, with the 1 - level interval (Student 1908).

    Where all are equal t is 0 (all are 0) or infinite. Raises ValueError for fewer than two.
    """
    n = len(differences)
    if n < 2:
        raise ValueError(f"{n} differences: an interval needs at least two warm starts")
    mean = math.fsum(differences) / n
    error = math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (n - 1) / n)
    t = mean / error if error else math.copysign(math.inf, mean) if mean else 0.0
    half = student_quantile(1 - level / 2, n - 1) * error
    return PairedT(mean, mean - half, mean + half, t, n - 1, min(1.0, 2 * student_tail(abs(t), n - 1)))


def holm(p: Sequence[float]) -> list[float]:
    """Adjusted p-values in the order of p: the family holds its level where those at most the level are rejected.

    Holm, "A simple sequentially rejective multiple test procedure" (1979).
    """
    adjusted, largest = [0.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        largest = max(largest, min(1.0, (len(p) - rank) * p[i]))
        adjusted[i] = largest
    return adjusted


def mixed_model(rows: Sequence[Mapping[str, Any]], first: str) -> MixedFit:
    """Fit MixedFit's model by restricted maximum likelihood (statsmodels).

    rows: one per run and prompt, with keys share, arm, warm_start, prompt. first: the arm that others are compared
    with. A prompt belongs to its warm start, so that warm starts are independent groups.
    """
    import pandas as pd
    from statsmodels.regression.mixed_linear_model import MixedLM
    from statsmodels.tools.sm_exceptions import ConvergenceWarning

    frame = pd.DataFrame([dict(row) for row in rows])
    frame["arm"] = pd.Categorical(frame["arm"], [first, *sorted(set(frame["arm"]) - {first})])
    with warnings.catch_warnings():
        # A variance at 0 is an answer, which `converged` and the table show.
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        fit = MixedLM.from_formula(
            "share ~ C(arm)",
            groups="warm_start",
            re_formula="1",
            vc_formula={"run": "0 + C(arm)", "prompt": "0 + C(prompt)"},
            data=frame,
        ).fit(reml=True, method=["lbfgs", "powell"])

    # Effects are named C(arm)[T.name]; components stand in the order of their names.
    effects = {}
    for name in fit.fe_params.index[1:]:
        low, high = fit.conf_int().loc[name]
        effects[name[len("C(arm)[T.") : -1]] = Effect(float(fit.fe_params[name]), float(low), float(high))
    components = dict(zip(fit.model.exog_vc.names, map(float, fit.vcomp), strict=True))
    variances = {"warm start": float(fit.cov_re.iloc[0, 0]), **components, "residual": float(fit.scale)}
    return MixedFit(effects, variances, bool(fit.converged))
