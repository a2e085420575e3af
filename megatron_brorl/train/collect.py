"""The first half of a step: prompts -> N rollouts each -> verdicts -> groups with a signal.

Rollouts may be lost, and may take several steps: a group is trained on with its survivors when none of it goes on.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from megatron_brorl.config.schema import Config
from megatron_brorl.data.source import PromptSource
from megatron_brorl.parallel import collectives
from megatron_brorl.parallel.balance import CostModel
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.rollout.engine import Sampling, in_order
from megatron_brorl.rollout.sampler import open_groups
from megatron_brorl.tracking.timeline import span
from megatron_brorl.train.assignment import assign_rows
from megatron_brorl.train.groups import CUT, Outcomes, drop_cut, gather_outcomes, group_metrics, select_groups
from megatron_brorl.train.partial_rollouts import Carried, carry, staleness
from megatron_brorl.train.recorder import recorded, take_recorded
from megatron_brorl.train.redistribute import exchange
from megatron_brorl.train.rounds import Taken, prompts_to_ask
from megatron_brorl.train.sample_and_score import Rollouts, Sampled, check_lost, check_scored
from megatron_brorl.types import OpenGroup, ScoredRollout


@dataclass(frozen=True)
class Collected:
    """What a step trains on, and what its sampling came to."""

    groups: list[OpenGroup]
    rollouts: list[ScoredRollout]  # those that this replica trains on, whoever sampled them
    outcomes: Outcomes  # of all groups, with those to train on chosen
    carried: Carried  # what goes on in the next step
    taken: Taken  # from the source so far
    metrics: dict[str, float]  # the same on every rank
    seconds: dict[str, float]  # of this rank, by phase
    recorded: list[ScoredRollout]  # of this rank's, those that people can read (train.record)


@dataclass(frozen=True)
class Collector:
    """What one step collects its groups with. The state of the run is given to `collect`, and comes back from it."""

    config: Config
    grid: Grid
    rollouts: Rollouts
    source: PromptSource
    sampling: Sampling
    costs: CostModel  # of training on a row

    def collect(self, carried: Carried, step: int, taken: Taken, version: int) -> Collected:
        """Sample, score and select; again while too few groups are kept and rollout.refills allows it. A collective.

        carried: what goes on from the step before. taken: from the source so far.
        version: of the actor's weights. Raises UserError where too many rollouts were lost, or have no verdict.
        """
        c, target = self.config, self.config.rollout.prompts
        # Equal answers share a verdict over all rounds of a step.
        self.rollouts.pool.forget()
        # Carried groups come first: rows of the step before are numbered by their place among them.
        groups = list(carried.groups)
        rows, before = carried.finished(), taken
        counts: defaultdict[str, float] = defaultdict(float)
        seconds: defaultdict[str, float] = defaultdict(float)
        # With refills these have been kept; partial rollouts, whose groups have not, are sampled without.
        missing = target - len(groups)
        # All ranks see the same tables, so that they leave this loop together.
        for _ in range(1 + c.rollout.refills):
            prompts = self.source.prompts(taken.prompts, prompts_to_ask(missing, taken, c.rollout))
            groups += open_groups(prompts, taken.rounds, taken.prompts)
            taken = taken.with_round(len(prompts))
            sampled = self._sample(carried, groups, len(prompts))
            rows += sampled.rollouts
            _add(counts, collectives.all_reduce_sum(sampled.counts))
            _add(seconds, sampled.seconds)

            too_old = [i for i, g in enumerate(groups) if step - int(g.step) >= c.rollout.max_carried_steps]
            outcomes = gather_outcomes(rows, len(groups), c.rollout.n, c.shaping.repetition_ngram)
            outcomes, given_up = drop_cut(outcomes, too_old)
            # Fail here rather than train on the few that came through.
            lost = counts["lost"] + given_up
            check_lost(f"step {step}", lost, counts["asked"], c.rollout.max_lost_share)
            check_scored(f"step {step}", counts["unscored"], counts["scored"])

            outcomes = select_groups(outcomes, c.algo.dynamic_sampling)
            taken = taken.with_share_of(before, sum(g >= len(carried.groups) for g in outcomes.kept))
            missing = target - len(outcomes.kept)
            if missing <= 0:
                break

        # With refills, what is kept beyond the target waits for the next step.
        waiting = outcomes.kept[target:] if c.rollout.refills else []
        outcomes = outcomes.without(waiting)

        begun = time.monotonic()
        prompt_tokens = [len(g.prompt.token_ids) for g in groups]
        with span("exchange"):
            assigned = assign_rows(outcomes, prompt_tokens, c.algo, self.costs, self.grid.data)
            exchanged = exchange(rows, outcomes, assigned.replica, self.grid)
        seconds["exchange"] = time.monotonic() - begun

        judging, queued = self.rollouts.verdict_metrics()
        metrics = self._metrics(outcomes, counts, lost) | judging
        metrics |= {"update_balance": assigned.balance, "moved_mib": exchanged.moved / 2**20}
        if c.rollout.refills:
            metrics |= {"prompts_sampled": counts["asked"] / c.rollout.n, "carried_groups": float(len(waiting))}
            metrics["rounds"] = float(taken.rounds - before.rounds)
        if c.rollout.partial_tokens or c.rollout.refills:
            going = [r for r in rows if assigned.replica[r.group, r.rollout.index] >= 0]
            metrics |= staleness(going, version)

        # Groups that have not closed continue in the next step. Rounds append rows; carried ones are in order.
        going_on = carry(groups, in_order(rows), outcomes.closed)
        shown = take_recorded(rows, recorded(groups, outcomes, c.run))
        return Collected(groups, exchanged.rows, outcomes, going_on, taken, metrics, dict(seconds) | queued, shown)

    def _sample(self, carried: Carried, groups: Sequence[OpenGroup], new: int) -> Sampled:
        """Continue the carried rollouts, and sample the rollouts of the last `new` groups."""
        c = self.config.rollout
        loads = carried.loads() if c.partial_tokens else [0] * self.grid.world
        slots = list(product(range(len(groups) - new, len(groups)), range(c.n)))
        with span("round"):
            return self.rollouts.sample(slots, groups, self.sampling, carried.begun(), loads)

    def _metrics(self, outcomes: Outcomes, counts: Mapping[str, float], lost: float) -> dict[str, float]:
        c = self.config.rollout
        metrics = {
            **group_metrics(outcomes),
            "unscored_share": counts["unscored"] / (counts["scored"] or 1.0),
            "verdict_errors": counts["errors"],
            "verdict_timeouts": counts["timeouts"],
            "lost_share": lost / counts["asked"],
            "late": counts["late"],
        }
        if c.partial_tokens:
            metrics["carried"] = float((outcomes.state == CUT).sum())
        return metrics


def _add(total: dict[str, float], part: Mapping[str, float]) -> None:
    for key, value in part.items():
        total[key] += value
