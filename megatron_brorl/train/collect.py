"""The first half of a training step: prompts -> N rollouts each -> rewards -> groups whose rewards differ.

With rollout.partial_tokens, a rollout may continue over several steps. A rollout is lost if its engine does not deliver
it in time, or if it is still unfinished when its group is max_carried_steps() steps old. A group is closed when none of
its rollouts continues. Its survivors are the rollouts that are not lost. A closed group is kept, which means trained
on, if the rewards of its survivors differ. With algo.dynamic_sampling = false, any survivor is enough. With
rollout.refills, kept groups beyond rollout.prompts are surplus: they are reopened and trained on in the next step.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from torch import Tensor

from megatron_brorl.config.schema import Config, RolloutConfig
from megatron_brorl.data.source import PromptSource
from megatron_brorl.parallel import collectives
from megatron_brorl.parallel.balance import CostModel
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.rollout.engine import Sampling, sort_rollouts
from megatron_brorl.rollout.sampler import make_groups
from megatron_brorl.tracking.timeline import span, timed
from megatron_brorl.train.carried_groups import CarriedGroups, carry_over, staleness
from megatron_brorl.train.group_rewards import GroupRewards
from megatron_brorl.train.groups import (
    CUT,
    Outcomes,
    Subset,
    choose_subset,
    gather_outcomes,
    group_metrics,
    mark_unfinished_as_lost,
    select_groups,
)
from megatron_brorl.train.recorder import choose_recorded, select_recorded
from megatron_brorl.train.redistribute import assign_replicas, send_to_replicas
from megatron_brorl.train.sample_and_score import RolloutRunner, check_lost, check_scored
from megatron_brorl.types import PromptGroup, ScoredRollout, TrainingRollout

SAFETY = 3.0  # margin of a round's size in standard deviations: 1 of 740 rounds keeps too few groups
MAX_OVERSAMPLE = 4  # largest round, in units of rollout.prompts
MAX_CARRIED_STEPS = 8  # steps after which an unfinished group is lost
DECAY = 0.5  # factor on the counts of earlier steps, once per step


@dataclass(frozen=True)
class SourcePosition:
    """Position in the prompt source and the recent share of kept groups. The same on every rank."""

    rounds: int = 0  # sampling rounds so far; each one has its own random streams
    prompts_read: int = 0  # from the source
    recent_prompts: float = 0.0  # prompts of recent steps, with weight DECAY per step
    recent_kept: float = 0.0  # kept groups among these

    def with_kept(self, start: SourcePosition, kept: int) -> SourcePosition:
        """Return the position with the share of kept groups updated by all rounds of the step so far.

        start: the position before the step. kept: kept groups whose prompts were sampled since, without carried groups.
        The share is computed from `start`, so that a call after every round counts each round once.
        """
        prompts = DECAY * start.recent_prompts + (self.prompts_read - start.prompts_read)
        return replace(self, recent_prompts=prompts, recent_kept=DECAY * start.recent_kept + kept)


def round_size(missing: int, position: SourcePosition, config: RolloutConfig) -> int:
    """Return the number of prompts to sample for `missing` more kept groups.

    Without refills, or while the share of kept groups is unknown, it is rollout.prompts. Otherwise, m p of m prompts
    are kept on average, where p is the probability that a prompt is kept. The standard deviation is
    sqrt(m p (1 - p) (1 + m / a)), because p is estimated from a = recent_prompts prompts. The result is the smallest m
    that satisfies

        m p - SAFETY sqrt(m p (1 - p) (1 + m / a)) >= missing

    but at least 1 and at most MAX_OVERSAMPLE x rollout.prompts. Surplus groups are trained on in the next step.
    """
    if not config.refills or not position.recent_prompts:
        return config.prompts
    largest = MAX_OVERSAMPLE * config.prompts
    if missing <= 0:
        # The carried groups suffice. Sample a prompt anyway, so that the recent share of kept groups stays up to date.
        return 1

    # Squared, the condition is (m p - missing)^2 = SAFETY^2 p (1 - p) (m + m^2 / a). Take the larger root.
    p = min(position.recent_kept / position.recent_prompts, 1.0)
    variance = SAFETY**2 * p * (1 - p)
    square = p**2 - variance / position.recent_prompts
    linear = 2 * p * missing + variance
    if square <= 0:
        return largest  # No number is safe: the kept share is too low for an estimate from so few prompts.
    m = (linear + math.sqrt(max(linear**2 - 4 * square * missing**2, 0.0))) / (2 * square)
    return min(math.ceil(m - 1e-9), largest)  # 1e-9: floating-point rounding must not add a prompt if p is 1.


def max_carried_steps(config: RolloutConfig) -> int:
    """Return after how many steps an unfinished group is lost: MAX_CARRIED_STEPS, or more for the longest response."""
    needed = math.ceil(config.max_tokens / config.partial_tokens) - 1 if config.partial_tokens else 0
    return max(MAX_CARRIED_STEPS, needed)


@dataclass(frozen=True)
class Collected:
    """The groups of a step, the rollouts to train on, and metrics."""

    groups: list[PromptGroup]  # all of the step, also those that are carried over or not kept
    rollouts: list[TrainingRollout]  # those that this replica trains on; any rank may have sampled them
    outcomes: Outcomes  # of all groups, with the choice of groups to train on
    subset: Subset  # the rollouts to train on
    carried: CarriedGroups
    source_position: SourcePosition
    metrics: dict[str, float]  # the same on every rank
    seconds: dict[str, float]  # of this rank, by phase
    recorded: list[ScoredRollout]  # the rollouts that this rank writes to the rollout log


@dataclass(frozen=True)
class Collector:
    """Collects the groups of each step."""

    config: Config
    grid: Grid
    runner: RolloutRunner
    source: PromptSource
    sampling: Sampling
    costs: CostModel  # of training on a rollout
    no_routes: Tensor | None = None  # routes [0, layers, k] of no token; None if rollouts have no routes

    def collect(
        self, carried: CarriedGroups, step: int, start: SourcePosition, version: int, seconds_left: float
    ) -> Collected:
        """Sample, score and select groups. Repeat while too few are kept, up to rollout.refills times. Collective.

        carried: groups from the previous step. start: where to read prompts. version: of the actor's weights.
        seconds_left: after this time, no further round is sampled (train.max_seconds).
        Raises UserError if too many rollouts are lost or have no reward.
        """
        config = self.config
        end = time.monotonic() + seconds_left
        target = config.rollout.prompts
        # Clear the cache of scores once per step, so that all rounds of the step share it.
        self.runner.pool.reset()
        # Carried groups come first, because ScoredRollout.group of their rollouts is an index into carried.groups.
        groups = list(carried.groups)
        scored = [r for r in carried.rollouts if r.rollout.finish != "cut"]
        scored_groups = set(range(len(groups)) if config.rollout.refills else ())
        group_rewards = GroupRewards(self.runner, self.sampling.stop_ids, scored_groups)
        position = start
        counts: defaultdict[str, float] = defaultdict(float)
        seconds: defaultdict[str, float] = defaultdict(float)
        # With refills, carried groups are surplus groups, which count towards the target. Without refills, round_size
        # ignores `missing`.
        missing = target - len(groups)
        # All ranks have the same outcomes, so they leave this loop together.
        for _ in range(1 + config.rollout.refills):
            prompts = self.source.prompts(position.prompts_read, round_size(missing, position, config.rollout))
            groups += make_groups(prompts, position.rounds, position.prompts_read)
            prompts_read = position.prompts_read + len(prompts)
            position = replace(position, rounds=position.rounds + 1, prompts_read=prompts_read)
            rollouts, own_counts, own_seconds = self._sample(carried, groups, len(prompts))
            own_counts["late"] = float(time.monotonic() > end)
            scored += rollouts
            _add(counts, collectives.all_reduce_sum(own_counts))
            _add(seconds, own_seconds)

            # Only runs without refills have unfinished groups. Their steps have one round each, so a difference of
            # rounds is an age in steps.
            limit = max_carried_steps(config.rollout)
            too_old = [i for i, g in enumerate(groups) if start.rounds - int(g.round) >= limit]
            outcomes = gather_outcomes(scored, len(groups), config.rollout.n, config.shaping.repetition_ngram)
            outcomes, given_up = mark_unfinished_as_lost(outcomes, too_old)
            lost = counts["lost"] + given_up
            check_lost(f"step {step + 1}", lost, counts["requested"], config.rollout.max_lost_share)
            check_scored(f"step {step + 1}", counts, self.runner.reported)

            if config.reward.group_function:
                with timed(seconds, "score"):
                    scored, outcomes = group_rewards.apply(f"step {step + 1}", groups, scored, outcomes)
            outcomes = select_groups(outcomes, config.algo.dynamic_sampling)
            position = position.with_kept(start, sum(g >= len(carried.groups) for g in outcomes.kept))
            missing = target - len(outcomes.kept)
            if missing <= 0 or counts["late"]:
                break

        surplus = outcomes.kept[target:] if config.rollout.refills else []
        # Surplus groups are reopened, because carry_over() carries the groups that are not closed.
        closed = [g for g in outcomes.closed if g not in surplus]
        outcomes = replace(outcomes, closed=closed, kept=[g for g in outcomes.kept if g not in surplus])

        with timed(seconds, "exchange"), span("exchange"):
            prompt_tokens = [len(g.prompt.token_ids) for g in groups]
            subset = choose_subset(outcomes, config.algo)
            replica, balance = assign_replicas(
                outcomes, subset, prompt_tokens, config.algo, self.costs, self.grid.dp_size
            )
            received, moved_bytes = send_to_replicas(
                scored, outcomes, replica, self.grid, prompt_tokens, self.no_routes
            )
        seconds["score_latency_max"] = self.runner.pool.stats.latency_max_s

        metrics = self._metrics(outcomes, counts, lost) | self.runner.reward_metrics()
        metrics |= {"update_balance": balance, "moved_mib": moved_bytes / 2**20}
        metrics |= {name: sum(values) / len(values) for name, values in group_rewards.metrics.items() if values}
        if config.rollout.refills:
            metrics["prompts_sampled"] = counts["requested"] / config.rollout.n
            metrics["surplus_groups"] = float(len(surplus))
            metrics["rounds"] = float(position.rounds - start.rounds)
        if config.rollout.partial_tokens or config.rollout.refills:
            metrics |= staleness([r for r in scored if replica[r.group, r.rollout.index] >= 0], version)

        return Collected(
            groups=groups,
            rollouts=received,
            outcomes=outcomes,
            subset=subset,
            carried=carry_over(groups, sort_rollouts(scored), outcomes.closed),
            source_position=position,
            metrics=metrics,
            seconds=seconds,
            recorded=select_recorded(scored, choose_recorded(groups, outcomes, config.run)),
        )

    def _sample(
        self, carried: CarriedGroups, groups: Sequence[PromptGroup], new_groups: int
    ) -> tuple[list[ScoredRollout], dict[str, float], dict[str, float]]:
        """Return RolloutRunner.sample of the partial rollouts and of N new ones for each of the last `new_groups`."""
        rollout = self.config.rollout
        to_begin = list(product(range(len(groups) - new_groups, len(groups)), range(rollout.n)))
        partial = {(r.group, r.rollout.index): r.rollout for r in carried.rollouts if r.rollout.finish == "cut"}
        partial_per_rank = collectives.all_gather(len(partial)) if rollout.partial_tokens else None
        with span("round"):
            return self.runner.sample(to_begin, groups, self.sampling, partial, partial_per_rank)

    def _metrics(self, outcomes: Outcomes, counts: Mapping[str, float], lost: float) -> dict[str, float]:
        metrics = {
            **group_metrics(outcomes),
            "unscored_share": counts["unscored"] / (counts["responses"] or 1.0),
            "verifier_errors": counts["errors"],
            "verifier_timeouts": counts["timeouts"],
            "lost_share": lost / counts["requested"],
            "slow_rollouts": counts["slow"],
        }
        if self.config.environment.factory or self.config.agent.function:
            responses = counts["responses"] or 1.0
            metrics["turns"] = counts["turns"] / responses
            metrics["tool_calls"] = counts["calls"] / responses
            metrics["malformed_call_share"] = counts["malformed"] / (counts["calls"] or 1.0)
            metrics["environments_lost"] = counts["environments"]
            if self.config.agent.function:
                metrics["sequences_per_rollout"] = counts["sequences"] / responses
        if self.config.rollout.partial_tokens:
            metrics["carried_rollouts"] = float((outcomes.state == CUT).sum())
        return metrics


def _add(total: dict[str, float], part: Mapping[str, float]) -> None:
    for key, value in part.items():
        total[key] += value
