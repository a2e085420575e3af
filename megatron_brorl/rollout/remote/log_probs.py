"""From the log-probabilities that an engine reports to those of the distribution that it sampled from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

Reported = Mapping[int, float]  # log-probability by token id, the sampled token's among them


def log_prob_limits(kind: str, temperature: float, top_p: float, top_k: int) -> str:
    """Why log-probs under this sampling distribution cannot be had, or "" where they can.

    kind: Capabilities.log_probs. Where few tokens survive top_k, their log-probs are all reported and are renormalised.
    """
    if temperature == 0 or kind == "processed" or top_k > 0 or (temperature == 1 and top_p == 1):
        return ""
    if kind == "tempered":
        return "" if top_p == 1 else "reports log-probs before top-p"
    return "reports log-probs of the model before temperature and top-p"


def sampled_log_probs(
    token_ids: Sequence[int], reported: Sequence[Reported], kind: str, temperature: float, top_p: float, top_k: int
) -> list[float]:
    """The log-probability of each sampled token under (temperature, top_p, top_k), as ops.reference.sampling has it.

    kind: Capabilities.log_probs. With top_k the top_k most likely tokens must be reported, whose log-probs divided by
    the temperature and renormalised are the distribution; without it nothing may be left to correct. Raises ValueError
    where a sampled token was not reported, or was cut.
    """
    if len(token_ids) != len(reported):
        raise ValueError(f"{len(reported)} log-probs for {len(token_ids)} tokens")
    if temperature == 0:
        return [0.0] * len(token_ids)  # a point mass

    result = []
    for token, entry in zip(token_ids, reported, strict=True):
        if token not in entry:
            raise ValueError(f"no log-prob of the sampled token {token} among {len(entry)} reported")
        if kind == "processed" or not top_k:
            result.append(entry[token])
        else:
            scale = temperature if kind == "raw" else 1.0
            result.append(_renormalised(token, {t: x / scale for t, x in entry.items()}, top_p, top_k))
    return result


def _renormalised(token: int, values: Mapping[int, float], top_p: float, top_k: int) -> float:
    order = sorted(values, key=lambda t: (-values[t], t))[:top_k]
    if token not in order:  # a tie with the last: either may be meant
        order[-1] = token
    peak = values[order[0]]
    mass = [math.exp(values[t] - peak) for t in order]
    ends = list(accumulate(mass))
    # A token stays while the mass before it is below top_p, so the first one always does.
    count = sum(end - m < top_p * ends[-1] for end, m in zip(ends, mass, strict=True))
    if token not in order[:count]:
        raise ValueError(f"the sampled token {token} lies outside of top_p = {top_p}")
    return values[token] - peak - math.log(ends[count - 1])
