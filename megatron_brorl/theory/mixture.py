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

    `weights` [G] is a fit to start from. The ends of the range maximise the log-likelihood plus lambda times the value,
    for a lambda found by bisection.
    """
    best = _log_likelihood(like, frequency, fit(like, frequency[None], weights[None], 2000)[0])
    low = _end(like, frequency, -values, weights, best)
    return -low, _end(like, frequency, values, weights, best)


def posterior(like: Floats, weights: Floats) -> Floats:
    """[K, G] probabilities of the success rates on GRID, given each kind of count, under weights [G]."""
    joint = like * weights
    result: Floats = joint / joint.sum(-1, keepdims=True)
    return result


def _end(like: Floats, frequency: Floats, values: Floats, weights: Floats, best: float) -> float:
    """The largest value within CUT of the best log-likelihood, or a little beyond it."""
    # For a value that varies by sigma from prompt to prompt, the tilt sought is about 2 sqrt(prompts) / sigma.
    scale = np.sqrt(frequency.sum())
    low, high = np.log(0.1 * scale), np.log(100 * scale)
    found = float(weights @ values)
    for _ in range(11):
        middle = (low + high) / 2
        tilted = _tilted(like, frequency, values, float(np.exp(middle)), weights)
        drop = best - _log_likelihood(like, frequency, tilted)
        if drop > CUT:
            high = middle
        else:
            low, weights = middle, tilted
        if drop < 1.2 * CUT:
            found = max(found, float(tilted @ values))
    return found


def _tilted(like: Floats, frequency: Floats, values: Floats, tilt: float, weights: Floats) -> Floats:
    """Maximise log-likelihood + tilt * value over weights, by expectation maximisation with a tilted second half."""
    before = np.inf
    for iteration in range(4000):
        # Expected counts of each success rate under the weights so far.
        counts = weights * ((frequency / (like @ weights)) @ like)
        counts[counts < 1e-100] = 0  # gone; dividing by what is left of them would overflow
        alive = counts > 0
        push = tilt * (values - values[alive].max())  # 0 at best, so that no gap below rounds to 0

        # weights = counts / (mu - push), with mu such that they add up to 1: Newton from the left of the root.
        mu = float((counts + push)[alive].max())
        for _ in range(30):
            gap = np.where(alive, mu - push, 1.0)
            terms = counts / gap
            excess = float(terms.sum()) - 1
            if abs(excess) < 1e-10:
                break
            # The excess is convex and falls in mu, so that no step from the left passes the root.
            mu += excess / float((terms / gap).sum())

        weights = terms / terms.sum()

        # Every fifty rounds: does the value still move?
        if iteration % 50 == 49:
            now = float(weights @ values)
            if abs(now - before) < 5e-5:
                break
            before = now

    return weights


def _log_likelihood(like: Floats, frequency: Floats, weights: Floats) -> float:
    return float(frequency @ np.log(like @ weights))
