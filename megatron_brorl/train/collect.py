"""The first half of a training step: prompts -> N rollouts each -> rewards -> groups whose rewards differ.

A rollout may be lost or may continue over several steps. A group is trained on with its
surviving rollouts once none of them continues.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from megatron_brorl.config.schema import Config, RolloutConfig
from megatron_brorl.data.source import PromptSource
from megatron_brorl.parallel import collectives
from megatron_brorl.parallel.balance import CostModel
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.rollout.engine import Sampling, sort_rollouts
from megatron_brorl.rollout.sampler import open_groups
from megatron_brorl.tracking.timeline import span
from megatron_brorl.train.groups import CUT, Outcomes, drop_cut, gather_outcomes, group_metrics, select_groups
from megatron_brorl.train.partial_rollouts import PartialRollouts, keep_open_groups, staleness
from megatron_brorl.train.recorder import choose_recorded, select_recorded
from megatron_brorl.train.redistribute import assign_replicas, send_to_replicas
from megatron_brorl.train.sample_and_score import RolloutRunner, Sampled, check_lost, check_scored
from megatron_brorl.types import OpenGroup, ScoredRollout

SAFETY = 3.0  # margin in standard deviations: 1 of 740 rounds keeps too few groups
MAX_OVERSAMPLE = 4  # largest round, in units of rollout.prompts
DECAY = 0.5  # weight of a step's counts one step later


@dataclass(frozen=True)
class SourcePosition:
    """Position in the prompt source and the recent share of kept groups. The same on every rank."""

    rounds: int = 0  # rounds so far; each one has its own random streams
    prompts: int = 0  # prompts read from the source
    recent_prompts: float = 0.0  # prompts of recent steps, with weight DECAY per step
    recent_kept: float = 0.0  # kept groups among these

    def after_round(self, prompts: int) -> SourcePosition:
        """Return the position after one more round of this many prompts."""
        return replace(self, rounds=self.rounds + 1, prompts=self.prompts + prompts)

    def with_kept(self, start: SourcePosition, kept: int) -> SourcePosition:
        """Return the position with the kept share updated. start: at the start of the step. kept: groups since then."""
        prompts = DECAY * start.recent_prompts + (self.prompts - start.prompts)
        return replace(self, recent_prompts=prompts, recent_kept=DECAY * start.recent_kept + kept)


def round_size(missing: int, position: SourcePosition, config: RolloutConfig) -> int:
    """Return the number of prompts to sample for `missing` more kept groups.

    Without refills, or before any kept share is known, it is rollout.prompts. Otherwise, of m prompts, each kept with
    probability p, m p are kept on average, with a standard deviation of sqrt(m p (1 - p) (1 + m / a)), because p is
    estimated from a = recent_prompts prompts. The result is the smallest m that satisfies

        m p - SAFETY sqrt(m p (1 - p) (1 + m / a)) >= missing

    between 1 and MAX_OVERSAMPLE x rollout.prompts. Surplus groups are trained on in the next step.
    """
    if not config.refills or not position.recent_prompts:
        return config.prompts
    largest = MAX_OVERSAMPLE * config.prompts
    if missing <= 0:
        return 1  # Surplus groups suffice, but the kept share must follow the current policy.

    # Squared, it is quadratic in m: (m p - missing)^2 = SAFETY^2 p (1 - p) (m + m^2 / a). Take the larger root.
    p = min(position.recent_kept / position.recent_prompts, 1.0)
    variance = SAFETY**2 * p * (1 - p)
    square = p**2 - variance / position.recent_prompts
    linear = 2 * p * missing + variance
    if square <= 0:
        return largest  # No number of prompts is safe at such a low kept share.
    m = (linear + math.sqrt(max(linear**2 - 4 * square * missing**2, 0.0))) / (2 * square)
    return min(math.ceil(m - 1e-9), largest)  # 1e-9: floating-point rounding must not add a prompt if p is 1.


@dataclass(frozen=True)
class Collected:
    """Groups to train on, and the metrics of sampling them."""

    groups: list[OpenGroup]
    rollouts: list[ScoredRollout]  # those that this replica trains on, from all ranks
    outcomes: Outcomes  # of all groups, with the choice of groups to train on
    partial: PartialRollouts  # groups that the next step continues, or trains on
    position: SourcePosition
    metrics: dict[str, float]  # the same on every rank
    seconds: dict[str, float]  # of this rank, by phase
    recorded: list[ScoredRollout]  # this rank's rollouts for the rollout log


@dataclass(frozen=True)
class Collector:
    """Collects the groups of one step."""

    config: Config
    grid: Grid
    rollouts: RolloutRunner
    source: PromptSource
    sampling: Sampling
    costs: CostModel  # of training on a rollout

    def collect(self, partial: PartialRollouts, step: int, position: SourcePosition, version: int) -> Collected:
        """Sample, score and select groups. Repeat while too few are kept, up to rollout.refills times. Collective.

        partial: groups that continue from the previous step. version: version of the actor's weights.
        Raises UserError if too many rollouts are lost or have no reward.
        """
        config = self.config
        target = config.rollout.prompts
        # Clear the cache of scores once per step, so that all rounds of the step share it.
        self.rollouts.pool.reset()
        # Partial groups come first, because ScoredRollout.group of their rollouts is an index into partial.groups.
        groups = list(partial.groups)
        scored = partial.finished_rollouts()
        start = position
        counts: defaultdict[str, float] = defaultdict(float)
        seconds: defaultdict[str, float] = defaultdict(float)
        # With refills, partial groups are surplus groups of the previous step and count towards the target. Without
        # refills, round_size ignores `missing`.
        missing = target - len(groups)
        # All ranks have the same tables, so they leave this loop together.
        for _ in range(1 + config.rollout.refills):
            prompts = self.source.prompts(position.prompts, round_size(missing, position, config.rollout))
            groups += open_groups(prompts, position.rounds, position.prompts)
            position = position.after_round(len(prompts))
            sampled = self._sample(partial, groups, len(prompts))
            scored += sampled.rollouts
            _add(counts, collectives.all_reduce_sum(sampled.counts))
            _add(seconds, sampled.seconds)

            too_old = [i for i, g in enumerate(groups) if step - int(g.step) >= config.rollout.max_carried_steps]
            outcomes = gather_outcomes(scored, len(groups), config.rollout.n, config.shaping.repetition_ngram)
            outcomes, given_up = drop_cut(outcomes, too_old)
            # Fail here rather than train on the few rollouts that are left.
            lost = counts["lost"] + given_up
            check_lost(f"step {step}", lost, counts["asked"], config.rollout.max_lost_share)
            check_scored(f"step {step}", counts["unscored"], counts["scored"])

            outcomes = select_groups(outcomes, config.algo.dynamic_sampling)
            position = position.with_kept(start, sum(g >= len(partial.groups) for g in outcomes.kept))
            missing = target - len(outcomes.kept)
            if missing <= 0:
                break

        # With refills, surplus groups wait for the next step.
        surplus = outcomes.kept[target:] if config.rollout.refills else []
        outcomes = outcomes.without(surplus)

        begun = time.monotonic()
        with span("exchange"):
            prompt_tokens = [len(g.prompt.token_ids) for g in groups]
            replica, balance = assign_replicas(outcomes, prompt_tokens, config.algo, self.costs, self.grid.dp_size)
            received, moved_bytes = send_to_replicas(scored, outcomes, replica, self.grid)
        seconds["exchange"] = time.monotonic() - begun

        reward_metrics, reward_seconds = self.rollouts.reward_metrics()
        metrics = self._metrics(outcomes, counts, lost) | reward_metrics
        metrics |= {"update_balance": balance, "moved_mib": moved_bytes / 2**20}
        if config.rollout.refills:
            metrics |= {"prompts_sampled": counts["asked"] / config.rollout.n, "carried_groups": float(len(surplus))}
            metrics["rounds"] = float(position.rounds - start.rounds)
        if config.rollout.partial_tokens or config.rollout.refills:
            metrics |= staleness([r for r in scored if replica[r.group, r.rollout.index] >= 0], version)

        return Collected(
            groups=groups,
            rollouts=received,
            outcomes=outcomes,
            partial=keep_open_groups(groups, sort_rollouts(scored), outcomes.closed),
            position=position,
            metrics=metrics,
            seconds=seconds | reward_seconds,
            recorded=select_recorded(scored, choose_recorded(groups, outcomes, config.run)),
        )

    def _sample(self, partial: PartialRollouts, groups: Sequence[OpenGroup], new: int) -> Sampled:
        """Continue the partial rollouts, and sample the rollouts of the last `new` groups."""
        rollout = self.config.rollout
        loads = partial.counts_per_rank() if rollout.partial_tokens else [0] * self.grid.world_size
        slots = list(product(range(len(groups) - new, len(groups)), range(rollout.n)))
        with span("round"):
            return self.rollouts.sample(slots, groups, self.sampling, partial.cut_rollouts(), loads)

    def _metrics(self, outcomes: Outcomes, counts: Mapping[str, float], lost: float) -> dict[str, float]:
        metrics = {
            **group_metrics(outcomes),
            "unscored_share": counts["unscored"] / (counts["scored"] or 1.0),
            "verdict_errors": counts["errors"],
            "verdict_timeouts": counts["timeouts"],
            "lost_share": lost / counts["asked"],
            "late": counts["late"],
        }
        if self.config.rollout.partial_tokens:
            metrics["carried"] = float((outcomes.state == CUT).sum())
        return metrics


def _add(total: dict[str, float], part: Mapping[str, float]) -> None:
    for key, value in part.items():
        total[key] += value
