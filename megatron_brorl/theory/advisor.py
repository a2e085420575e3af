"""How many rollouts per prompt? From the log of a pilot: what N = 2 ... 1024 would keep, leave unsampled and cost.

Every figure is a mean over groups with a 95% bootstrap interval over prompts, and says how it is known:

unbiased       a U-statistic of the counts, possible up to the pilot's own number of rollouts
ratio          of two such means, over prompts: consistent, but biased where the pilot has few prompts or rollouts
extrapolated   from the distribution of success rates that fits the counts; its interval holds whatever distributions
               the counts do not contradict, which is wide far beyond the pilot's n, and has to be
bound          the most that the pilot's outcomes allow; the interval begins at the least
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from megatron_brorl.algo.estimators import Interval
from megatron_brorl.errors import UserError
from megatron_brorl.theory import mixture
from megatron_brorl.theory.costs import Costs
from megatron_brorl.theory.diagnostics import coupling
from megatron_brorl.theory.log import LoggedGroup
from megatron_brorl.theory.targets import CANDIDATES, TARGETS, Targets

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Known = Literal["unbiased", "ratio", "extrapolated", "bound"]


@dataclass(frozen=True)
class Candidate:
    """One N. Shares are in [0, 1]."""

    n: int
    kept: Interval  # share of prompts with at least one right and one wrong rollout
    kept_known: Known
    variance: Interval  # of the gradient with a group baseline, per prompt, in units of E|grad log p|^2
    coupling: Interval | None  # unsampled coupling over that of no draws; None: unknown, no outcomes or none twice
    coupling_known: Known | None
    seconds: Interval  # per step, in costs.unit
    efficiency: float  # (N - 1) per time of a prompt, over the best candidate's
    meets: tuple[bool, bool, bool]  # the targets on kept, coupling, efficiency


@dataclass(frozen=True)
class Advice:
    candidates: tuple[Candidate, ...]
    recommended: int | None  # None: no candidate meets the targets
    recommended_low: int | None  # 95% bootstrap interval; None: no candidate there
    recommended_high: int | None
    prompts: int  # distinct prompts of the log
    groups: int
    pilot_n: tuple[int, int]  # smallest and largest group

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def kept_share(right: Ints, n: Ints, wanted: int) -> Floats:
    """Unbiased estimates of the chance that `wanted` rollouts hold a right and a wrong one, wanted <= n; all [groups].

    1 - (C(c, N) + C(n - c, N)) / C(n, N): the share of N-subsets of the n rollouts that dynamic sampling would keep.
    """
    if wanted > n.min():
        raise ValueError(f"kept_share: {n.min()} rollouts say nothing unbiased about {wanted}")
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n.max() + 1)))])

    def alike(c: Ints) -> Floats:
        chance: Floats = np.where(
            c >= wanted, np.exp(logs[c] - logs[np.maximum(c - wanted, 0)] - logs[n] + logs[n - wanted]), 0.0
        )
        return chance

    return 1 - alike(right) - alike(n - right)


def spread(right: Ints, n: Ints) -> Floats:
    """Unbiased estimates of s (1 - s), s the success rate: c (n - c) / (n (n - 1)) [groups]."""
    return right * (n - right) / (n * (n - 1.0))


def advise(
    groups: Sequence[LoggedGroup],
    threshold: float,
    costs: Costs,
    prompts: float,
    resamples: int = 500,
    seed: int = 0,
    targets: Targets = TARGETS,
    candidates: Sequence[int] = CANDIDATES,
) -> Advice:
    """Advice from a log. A rollout is right if its reward is at least `threshold`; a step trains on `prompts` prompts.

    candidates: the values of N, each at least 2, ascending.

    The variance is that of g = N / (N - 1) (1 / N) sum (R_i - mean) grad log p_i, unbiased, for independent rewards and
    score functions: s (1 - s) / (N - 1), which is N / (N - 1) times that of a perfect baseline. The signal of a prompt
    is its inverse, so that signal per time is (N - 1) over the time of a prompt, up to a factor that N does not change.
    """
    # Intervals come from resampling prompts: a single one has none.
    names = sorted({g.prompt_id for g in groups})
    if len(names) < 2:
        raise UserError("the log holds one prompt; intervals over prompts need at least 2, and advice needs dozens")

    # Every group as counts: rollouts, and right ones among them.
    n = np.array([g.n for g in groups])  # [groups]
    right = np.array([int((g.rewards >= threshold).sum()) for g in groups])
    if right.sum() == 0:
        raise UserError(f"no rollout of the log has a reward of at least {threshold:g}; set --right lower")

    # Each figure of each candidate [candidates, 1 + resamples].
    times = _resampled(np.searchsorted(names, [g.prompt_id for g in groups]), len(names), resamples, seed)
    kept, ranges, known = _kept_shares(right, n, times, candidates)
    signal = _means(times, spread(right, n))  # [1 + resamples]: mean s (1 - s)
    # Couplings are None where outcomes are not logged, are too few, or never came twice.
    left, left_ranges, left_known = _couplings(groups, threshold, times, candidates)
    per_time = np.stack([(c - 1) / np.array([costs.prompt(c, k) for k in kept[i]]) for i, c in enumerate(candidates)])
    efficiency = per_time / per_time.max(0)  # over the best candidate's

    # The smallest candidate that meets all targets, in the log and in every sample of it.
    meets = np.stack(
        [
            kept >= targets.kept * kept[-1],
            np.ones_like(kept, dtype=bool) if left is None else left <= targets.coupling,
            efficiency >= targets.efficiency,
        ]
    )
    choice = _first(np.asarray(meets.all(0)))  # indices [1 + resamples]

    # What there is to say of each candidate.
    found = []
    for i, c in enumerate(candidates):
        share = _interval(kept[i], ranges[i])
        # The cost falls as the kept share rises.
        ends = sorted(costs.step(prompts, c, k) for k in (share.low, share.high))
        found.append(
            Candidate(
                n=c,
                kept=share,
                kept_known=known[i],
                variance=_interval(signal / (c - 1)),
                coupling=None if left is None else _interval(left[i], left_ranges[i]),
                coupling_known=None if left is None else left_known[i],
                seconds=Interval(costs.step(prompts, c, share.mean), ends[0], ends[1]),
                efficiency=float(efficiency[i, 0]),
                meets=(bool(meets[0, i, 0]), bool(meets[1, i, 0]), bool(meets[2, i, 0])),
            )
        )

    # And of the choice.
    low, high = np.percentile(choice[1:], [2.5, 97.5], method="nearest")

    # Entry 0 is the log itself: it makes the recommendation, the samples only its interval.
    return Advice(
        candidates=tuple(found),
        recommended=_name(choice[0], candidates),
        recommended_low=_name(low, candidates),
        recommended_high=_name(high, candidates),
        prompts=len(names),
        groups=len(groups),
        pilot_n=(int(n.min()), int(n.max())),
    )


def _resampled(owner: Ints, prompts: int, resamples: int, seed: int) -> Floats:
    """How often each group is in the log and in bootstrap samples of its prompts [1 + resamples, groups].

    owner [groups]: the prompt of each group; a prompt is drawn with all of its groups. Row 0 is the log itself.
    """
    draw = np.random.Generator(np.random.Philox(key=seed % 2**64)).multinomial
    sizes = np.full(prompts, 1 / prompts)
    return np.vstack([np.ones(len(owner)), draw(prompts, sizes, size=resamples)[:, owner]])


def success_rates(right: Ints, n: Ints) -> tuple[Floats, Floats]:
    """Distribution [G] of success rates on mixture.GRID that fits the counts; each group's posterior [groups, G]."""
    like, kinds, frequency = _kinds(right, n, np.ones((1, len(n))))
    weights = mixture.fit(like, frequency)[0]
    return weights, mixture.posterior(like, weights)[kinds]


def _kept_shares(
    right: Ints, n: Ints, times: Floats, candidates: Sequence[int]
) -> tuple[Floats, list[tuple[float, float] | None], list[Known]]:
    """Kept shares [candidates, 1 + resamples], the range of an extrapolation, and how each is known."""
    rows: list[Floats] = []
    ranges: list[tuple[float, float] | None] = []
    known: list[Known] = []
    fitted: Floats | None = None

    like, _, frequency = _kinds(right, n, times)  # groups with equal counts are of one kind
    for wanted in candidates:
        # Subsets of the pilot's own rollouts.
        if wanted <= n.min():
            rows.append(_means(times, kept_share(right, n, wanted)))
            ranges.append(None)
            known.append("unbiased")
            continue

        # Beyond them a distribution of success rates is needed, fitted once.
        values = 1 - mixture.GRID**wanted - (1 - mixture.GRID) ** wanted  # [G] kept share at each success rate
        if fitted is None:
            whole = mixture.fit(like, frequency[:1])
            # Samples begin with the fit of the log, and need fewer iterations.
            again = mixture.fit(like, frequency[1:], np.repeat(whole, len(times) - 1, axis=0), iterations=200)
            fitted = np.vstack([whole, again])

        # The row is the best fit; the range holds every distribution that the counts allow.
        rows.append(fitted @ values)  # expectations over the fitted distribution
        ranges.append(mixture.profile(like, frequency[0], values, fitted[0]))
        known.append("extrapolated")
    return np.stack(rows), ranges, known


def _kinds(right: Ints, n: Ints, times: Floats) -> tuple[Floats, Ints, Floats]:
    """Likelihoods [K, G] of the distinct counts, which one each group has, and how often each occurs [rows, K]."""
    distinct, kinds = np.unique(np.stack([right, n]), axis=1, return_inverse=True)
    kinds = kinds.reshape(-1)
    return mixture.likelihood(distinct[0], distinct[1]), kinds, times @ np.eye(distinct.shape[1])[kinds]


def _couplings(
    groups: Sequence[LoggedGroup], threshold: float, times: Floats, candidates: Sequence[int]
) -> tuple[Floats | None, list[tuple[Floats, Floats] | None], list[Known]]:
    """Unsampled coupling over the whole coupling [candidates, rows], ranges of bounds, and how each is known.

    As a function of N the expectation is a sum of w_j (1 - p_j)^N with w_j >= 0. Beyond m = n - 3 that gives both
    bounds: it is log-convex, so it lies above its own chord prolonged; and sum w p (1-p)^m p (1-p)^(N-m) is at most
    the first-order sum at m times the largest p (1 - p)^(N - m).
    """
    known: list[Known] = []
    ranges: list[tuple[Floats, Floats] | None] = []
    n = min(g.n for g in groups)
    if n < 5 or any(g.outcomes is None for g in groups):
        return None, [None] * len(candidates), known

    # Estimates at no draws, at two numbers that span a chord, and at the candidates within reach.
    last = n - 3
    at = np.array([0, last // 2, last, *[c for c in candidates if c <= last]])
    pairs = [(g.outcomes, g.rewards >= threshold) for g in groups if g.outcomes is not None]
    second = _means(times, np.stack([coupling(o, r, at) for o, r in pairs]))  # [rows, at]
    # One sibling with the outcome in place of two: masses, not second moments.
    first = _means(times, np.stack([coupling(o, r, np.array([last]), order=1) for o, r in pairs]))[:, 0]

    whole = np.where(second[:, 0] > 0, second[:, 0], np.nan)  # nan: no two siblings ever agreed
    if np.isnan(whole[0]):
        return None, [None] * len(candidates), known

    rows = []
    for i, c in enumerate(candidates):
        if c <= last:
            rows.append(second[:, 3 + i] / whole)
            ranges.append(None)
            known.append("ratio")
            continue

        # Beyond the pilot: an upper bound, at most what is left at m = last ...
        gap = c - last  # draws beyond reach
        largest = (1 / (gap + 1)) * (1 - 1 / (gap + 1)) ** gap  # of p (1 - p)^gap
        high = np.minimum(first * largest, second[:, 2])

        # ... and a lower one, by the chord.
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(second[:, 1] > 0, second[:, 2] / second[:, 1], 0.0)
        low = np.minimum(second[:, 2] * ratio ** (gap / (last - last // 2)), high)

        rows.append(high / whole)
        ranges.append((low / whole, high / whole))  # the two bounds
        known.append("bound")
    return np.stack(rows), ranges, known


def _means(times: Floats, values: Floats) -> Floats:
    """Means of values [groups, ...] over each row of times [rows, groups]."""
    result: Floats = (times @ values) / times.sum(-1).reshape(-1, *[1] * (values.ndim - 1))
    return result


def _interval(row: Floats, more: tuple[Any, Any] | None = None) -> Interval:
    """Entry 0 with the percentiles of the rest, widened to hold a range: two numbers, or two rows like `row`."""
    low, high = np.nanpercentile(row[1:], [2.5, 97.5])
    if more is not None:
        lows, highs = (np.atleast_1d(x) for x in more)
        low = min(low, float(np.nanpercentile(lows, 2.5)))
        high = max(high, float(np.nanpercentile(highs, 97.5)))
    return Interval(float(row[0]), float(min(low, row[0])), float(max(high, row[0])))


def _first(meets: npt.NDArray[np.bool_]) -> Ints:
    """Index of the first candidate of each row that meets all targets [rows]; their number where none does."""
    return np.where(meets.any(0), meets.argmax(0), len(meets))


def _name(index: int, candidates: Sequence[int]) -> int | None:
    return candidates[int(index)] if int(index) < len(candidates) else None
