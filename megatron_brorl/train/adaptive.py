"""Unequal groups: a first round of every prompt's rollouts decides how many it gets in a second one.

How many there are depends on what the first round brought, so that averages over both rounds would be biased: a prompt
stops early where its first rollouts were of one kind. Each round is therefore its own estimate of the prompt's
gradient, with its own baseline; given the first round the second is unbiased, whatever was allocated. Fixed parts of
the two, as large as with n rollouts for every prompt, add up to the same expectation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_brorl.algo.advantage import Moments, group_baseline, whiten
from megatron_brorl.algo.objectives import pass_at_k_advantages, truncated_log_advantages
from megatron_brorl.config.schema import AlgoConfig, RolloutConfig
from megatron_brorl.parallel import device
from megatron_brorl.theory.allocation import least_of, second_round
from megatron_brorl.train.groups import Outcomes, group_metrics


@dataclass(frozen=True)
class Rounds:
    """A prompt's n rollouts, on average, in two rounds."""

    n: int
    first: int

    @property
    def least(self) -> int:
        """The fewest rollouts of a prompt in both rounds."""
        return self.first + least_of(self.n - self.first)

    @property
    def order(self) -> int:
        """The largest k that pass@k can be estimated for without bias from either round alone, however allocated."""
        return min(self.first, least_of(self.n - self.first)) - 1


def rounds_of(config: RolloutConfig) -> Rounds | None:
    """None where every prompt gets n rollouts."""
    return None if config.adaptive == "off" else Rounds(config.n, config.adaptive_first or config.n // 4)


def allocate_rest(outcomes: Outcomes, rounds: Rounds, config: RolloutConfig) -> list[tuple[int, int]]:
    """(group, sibling) of the second round, in order, after a first round came to `outcomes`; a collective."""
    if config.adaptive == "off":
        return []
    right = (outcomes.right & outcomes.ended).sum(1).numpy()
    counts = second_round(right, outcomes.ended.sum(1).numpy(), rounds.n - rounds.first, config.adaptive)
    # Ranks on unlike processors may round a tie in two ways: the first one decides.
    shared = torch.from_numpy(counts).to(device.default_device())
    dist.broadcast(shared, 0)
    return [(g, rounds.first + i) for g, count in enumerate(shared.tolist()) for i in range(count)]


def raw_advantages(outcomes: Outcomes, kept: Sequence[int], rounds: Rounds, algo: AlgoConfig) -> tuple[Tensor, Tensor]:
    """Advantages of the kept groups' survivors over their round's baseline, and weights; float32 [groups, siblings].

    A round of k survivors that stands for w of the n rollouts has weights w / k. With the mean as baseline advantages
    are (R - mean) k / (k - 1) (n - 1) / n, which is unbiased but for the factor that the mean of n rollouts has; those
    of pass@k are unbiased at any k, and MaxRL's up to one order (Rounds.order) for all rounds. Summed over rollouts,
    the expected gradient is that of n rollouts for every prompt. A round of one survivor has advantage 0.
    """
    advantages, weights = torch.zeros_like(outcomes.rewards), torch.zeros_like(outcomes.rewards)
    n, first = rounds.n, rounds.first
    for g in kept:
        for part, stands_for in ((slice(0, first), first), (slice(first, None), n - first)):
            alive = outcomes.ended[g, part]
            k = int(alive.sum())
            if k:
                weights[g, part][alive] = stands_for / k
            if k > 1:
                advantages[g, part][alive] = _of_round(outcomes.rewards[g, part][alive], rounds, algo)
    return advantages, weights


def _of_round(rewards: Tensor, rounds: Rounds, algo: AlgoConfig) -> Tensor:
    """Of a round of k >= 2 survivors, [k]."""
    if algo.advantage == "pass_at_k":
        return pass_at_k_advantages(rewards, algo.pass_k)
    if algo.advantage == "maxrl":
        return truncated_log_advantages(rewards, rounds.order)
    k, n = len(rewards), rounds.n
    return k / (k - 1) * (n - 1) / n * group_baseline(rewards)


def of_rounds(outcomes: Outcomes, kept: Sequence[int], rounds: Rounds, algo: AlgoConfig) -> tuple[Tensor, Tensor]:
    """raw_advantages, whitened over the step's rollouts by their weights but for MaxRL's; and these weights.

    Both [groups, siblings].
    """
    advantages, weights = raw_advantages(outcomes, kept, rounds, algo)
    if algo.advantage == "maxrl":
        return advantages, weights
    x, w = advantages.double(), weights.double()
    count = float(w.sum())
    mean = float((w * x).sum()) / (count or 1.0)
    batch = Moments(count, mean, float((w * (x - mean).square()).sum()))
    return torch.where(weights > 0, whiten(advantages, batch), 0.0), weights


def even_metrics(outcomes: Outcomes, rounds: Rounds | None) -> dict[str, float]:
    """Those of group_metrics that an uneven allocation would move, over the first round alone; and its extent."""
    if rounds is None:
        return {}
    found = group_metrics(outcomes.first_siblings(rounds.first))
    sizes = outcomes.ended.sum(1).double()
    return {
        **{k: found[k] for k in ("reward", "response_tokens", "cut_off_share")},
        "group_size_least": float(sizes.min()),
        "group_size_most": float(sizes.max()),
    }
