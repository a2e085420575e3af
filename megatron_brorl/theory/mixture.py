"""How the success rates of prompts are distributed, from counts of right rollouts; for what lies beyond those counts.

n rollouts fix the first n moments of the distribution of success rates and nothing else. What N > n rollouts would show
depends on the rest: a prompt with 0 of 16 right may have success rate 0, or 1 in 100. So a fit gives a plausible value,
and `profile` the range of values that the counts do not contradict.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_POINTS, _EDGE = 121, 1e-5
_logit = np.linspace(np.log(_EDGE), -np.log(_EDGE), _POINTS)
GRID: Floats = np.concatenate([[0.0], 1 / (1 + np.exp(-_logit)), [1.0]])  # success rates, the two ends included

CUT = 1.9207  # half the 95% quantile of chi-square with one degree of freedom


def likelihood(right: Ints, n: Ints) -> Floats:
    """[K, len(GRID)] of c right ones among n rollouts, each row up to a factor that makes its largest entry 1."""
    c, wrong = right[:, None].astype(np.float64), (n - right)[:, None].astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.where(c > 0, c * np.log(GRID), 0.0) + np.where(wrong > 0, wrong * np.log1p(-GRID), 0.0)
    result: Floats = np.exp(logs - logs.max(-1, keepdims=True))
    return result


def fit(like: Floats, frequency: Floats, start: Floats | None = None, iterations: int = 500) -> Floats:
    """Weights [R, G] on GRID by expectation maximisation (Laird 1978), for R samples at once.

    like [K, G]; frequency [R, K], how often each kind of count occurred. Every iteration raises the likelihood; where
    the counts leave the weights open, they stay near the start, by default equal weights.
    """
    weights = np.full((len(frequency), like.shape[1]), 1 / like.shape[1]) if start is None else start
    total = frequency.sum(-1, keepdims=True)
    for _ in range(iterations):
        # A kind of count that a sample lacks has no say, even where its probability has underflowed to 0.
        ratio = np.divide(frequency, weights @ like.T, out=np.zeros_like(frequency), where=frequency > 0)
        weights = weights * (ratio @ like) / total
    return weights


def profile(like: Floats, frequency: Floats, values: Floats, weights: Floats) -> tuple[float, float]:
    """The range of sum_g w_g values_g over all w whose log-likelihood is within CUT of the best; frequency [K].

    It holds the value of `weights` [G], a fit. The ends of the range maximise the log-likelihood plus lambda times the
    value, for a lambda at which CUT is lost.
    """
    seen = frequency > 0
    like, frequency = like[seen], frequency[seen]
    best = _log_likelihood(like, frequency, _tilted(like, frequency, 0 * values))
    low = _end(like, frequency, -values, float(-values @ weights), best)
    return -low, _end(like, frequency, values, float(values @ weights), best)


def posterior(like: Floats, weights: Floats) -> Floats:
    """[K, G] probabilities of the success rates on GRID, given each kind of count, under weights [G]."""
    joint = like * weights
    result: Floats = joint / joint.sum(-1, keepdims=True)
    return result


def _end(like: Floats, frequency: Floats, values: Floats, found: float, best: float) -> float:
    """The largest value within CUT of the best log-likelihood, to 1e-3; at least `found`."""
    # For a value that varies by sigma from prompt to prompt, the tilt sought is about 2 sqrt(prompts) / sigma.
    scale = np.sqrt(frequency.sum())
    low, high = np.log(0.1 * scale), np.log(100 * scale)
    middle = np.log(2 * scale)
    within, beyond = (0.0, found), (np.inf, np.inf)  # (drop, value) on both sides of CUT

    for _ in range(20):
        tilted = _tilted(like, frequency, float(np.exp(middle)) * values)
        drop, value = best - _log_likelihood(like, frequency, tilted), float(tilted @ values)
        low, high = (middle, high) if drop <= CUT else (low, middle)
        within, beyond = ((drop, value), beyond) if drop <= CUT else (within, (drop, value))
        if abs(drop - CUT) < 0.01 * CUT or abs(beyond[1] - within[1]) < 1e-3 or high - low < 1e-3:
            break

        # The drop grows about with the square of the tilt: where it does, this is the next one.
        middle = middle + 0.5 * np.log(CUT / max(drop, 1e-3 * CUT))
        if not low < middle < high:
            middle = (low + high) / 2

    # The log-likelihood is concave: a mixture of two that lose less and more than CUT loses no more than the line says.
    if np.isfinite(beyond[0]):
        share = (CUT - within[0]) / (beyond[0] - within[0])
        return max(found, within[1] + share * (beyond[1] - within[1]))
    return max(found, within[1])


def _tilted(like: Floats, frequency: Floats, push: Floats) -> Floats:
    """Weights [G] that maximise log-likelihood + sum_g w_g push_g, to 5e-3 of it.

    By Newton's method with a logarithmic barrier before w >= 0, which leaves a gap of G / sharpness (Boyd and
    Vandenberghe 2004, sections 10.2 and 11.3).
    """
    weights = np.full(like.shape[1], 1 / like.shape[1])
    enough = 200.0 * len(weights)
    for sharpness in enough / 30.0 ** np.arange(4)[::-1]:
        now = _barrier(like, frequency, push, sharpness, weights)
        for _ in range(100):
            step, decrement = _newton(like, frequency, push, sharpness, weights)
            if decrement < 0.05:  # which makes half of it of the barrier's, in units of 1 / sharpness
                break

            # As far as the barrier allows, and back until a part of what the slope promises is there.
            falling = step < 0
            length = min(1.0, 0.95 * float((-weights[falling] / step[falling]).min(initial=np.inf)))
            then = _barrier(like, frequency, push, sharpness, weights + length * step)
            while then > now - 0.1 * length * decrement and length > 1e-9:
                length /= 2
                then = _barrier(like, frequency, push, sharpness, weights + length * step)
            weights, now = weights + length * step, then
    return weights / weights.sum()


def _newton(like: Floats, frequency: Floats, push: Floats, sharpness: float, weights: Floats) -> tuple[Floats, float]:
    """The step [G] of Newton's method within sum_g w_g = 1, and the square of its decrement."""
    # The Hessian is a diagonal plus one of rank K: its inverse by Woodbury's identity.
    chance = like @ weights  # [K]
    slope = -sharpness * ((frequency / chance) @ like + push) - 1 / weights
    scaled = like * weights  # like @ the root of the diagonal's inverse
    inner = scaled @ scaled.T + np.diag(chance**2 / (sharpness * frequency))

    def solved(vectors: Floats) -> Floats:
        along = weights[:, None] * vectors
        result: Floats = weights[:, None] * (along - scaled.T @ np.linalg.solve(inner, scaled @ along))
        return result

    down, ones = solved(np.stack([slope, np.ones_like(slope)], axis=1)).T
    step = -down + ones * (down.sum() / ones.sum())
    return step, float(-step @ slope)


def _barrier(like: Floats, frequency: Floats, push: Floats, sharpness: float, weights: Floats) -> float:
    return -sharpness * (_log_likelihood(like, frequency, weights) + float(weights @ push)) - float(
        np.log(weights).sum()
    )


def _log_likelihood(like: Floats, frequency: Floats, weights: Floats) -> float:
    return float(frequency @ np.log(like @ weights))
