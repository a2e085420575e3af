"""Sampling and scoring: from open groups to rollouts with verdicts on this rank."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron_brorl.config.schema import RewardConfig
from megatron_brorl.data.tokenizers import Tokenizer
from megatron_brorl.errors import UserError
from megatron_brorl.parallel import collectives
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.rewards.extract import code
from megatron_brorl.rewards.scoring import Scorer
from megatron_brorl.rewards.worker_pool import RewardPool
from megatron_brorl.rollout.engine import KvUsage, Request, Sampling
from megatron_brorl.rollout.sampler import Slot, deal, improbable_rollouts, requests
from megatron_brorl.rollout.watchdog import GenerationResult, Watchdog
from megatron_brorl.rollout.work_stealing import SlotSupply, WorkStealing
from megatron_brorl.tracking.timeline import span
from megatron_brorl.types import OpenGroup, Rollout, ScoredRollout

MOST_UNSCORED = 0.5  # with a larger share of failed verdicts rewards mean nothing
_FAILED = ("timeout", "broken", "invalid", "crash")


@dataclass(frozen=True)
class Sampled:
    """What this rank's share of a step came to."""

    rollouts: list[ScoredRollout]  # without the lost ones; "cut" ones only where the sampling has a budget
    # Rollouts "asked", "lost" and "late"; responses "scored", and "unscored" because the verifier failed; answers that
    # it raised on although it can judge others ("errors") or took too long over ("timeouts")
    counts: dict[str, float]
    seconds: dict[str, float]  # "generate"; "score": of verdicts after that


@dataclass(frozen=True)
class Rollouts:
    """The engine and the verifiers of one rank."""

    engine: Watchdog
    pool: RewardPool
    tokenizer: Tokenizer
    reward: RewardConfig
    seed: int
    grid: Grid
    max_lost_share: float  # config key rollout.max_lost_share
    work_stealing: WorkStealing | None = None  # None: every rank samples only its own share
    told: set[int] = field(default_factory=set)  # codes of the messages printed about verifiers that raise

    def sample(
        self,
        new: Sequence[Slot],
        groups: Sequence[OpenGroup],
        sampling: Sampling,
        begun: Mapping[Slot, Rollout] | None = None,
        loads: Sequence[int] | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> Sampled:
        """This rank's share of the rollouts of `groups`; every rank calls it, and all leave it together.

        new: those that begin, of all ranks, in (group, sibling) order. begun: this rank's "cut" ones, which go on;
        loads: how many there are on every rank. Rollouts that end up "cut" are lost unless sampling.budget says that
        they go on in the next step. on_end: told of every rollout of this rank that ends, as it does, in the thread
        that generates.
        """
        start, begun, loads = time.monotonic(), begun or {}, loads or [0] * self.grid.world
        parts = deal(new, loads)
        slots = [*begun, *parts[self.grid.rank]]
        # Engines take new ones as they have room, other ranks' too. Begun ones stay with their rank.
        shared = self.work_stealing.begin(parts, self.grid.rank) if self.work_stealing else None
        # A run of siblings is one request, by which the engine knows that they share a prompt.
        asked, numbers = requests(list(begun) if shared else slots, groups, begun, self.seed)
        prompts = [request.prompt for request in asked]

        def taken(slots: Sequence[Slot]) -> list[Request]:
            # In the engine's thread, before it tells of any of these.
            more, of = requests(slots, groups, {}, self.seed)
            numbers.extend(of)
            prompts.extend(request.prompt for request in more)
            return more

        longest = max((len(group.prompt.token_ids) for group in groups), default=0)
        supply = SlotSupply(shared, taken, len(new), longest) if shared else None
        with Scorer(prompts, self.tokenizer.decode, sampling.stop_ids, self.pool, self.reward) as scorer:
            # Verdicts are made while others are still being sampled.
            def finished(request: int, rollout: Rollout) -> None:
                scorer.finished(request, rollout)
                if on_end:
                    on_end()

            with span("generate", self.engine.timeout_s + self.engine.grace_s) as came_to:
                result = self.engine.generate(asked, sampling, finished, supply)
            came_to |= _generated(result, self.engine.kv_usage())
            # A collective, and before verdicts count: repeated rollouts would pass for independent ones everywhere.
            _check_distinct(result.requests, result.rollouts, self.engine.engine.if_repeating)
            middle = time.monotonic()

            done = [(i, r) for i, rollouts in enumerate(result.rollouts) for r in rollouts if r.finish != "cut"]
            with span("verdicts", self.reward.timeout_s):
                scores = scorer.scores([(i, r.index) for i, r in done])
        # Answers go on as codes: tables of numbers cross ranks, texts do not.
        columns = scores.rewards.tolist(), scores.right, map(code, scores.answers), scores.results
        scored = [ScoredRollout(numbers[i], r, *own) for (i, r), *own in zip(done, *columns, strict=True)]
        score = time.monotonic() - middle

        # Without a verdict so far, which NaN says; group and sibling keep its place for the next step.
        cut: list[ScoredRollout] = []
        if sampling.budget:
            for number, rollouts in zip(numbers, result.rollouts, strict=False):  # one that is stuck may still take
                cut += [ScoredRollout(number, r, float("nan"), right=False) for r in rollouts if r.finish == "cut"]

        # Ranks wait here, so that seconds are a rank's own.
        self.grid.barrier()
        self._tell(scores.raised)
        counts = {
            "asked": len(slots),
            "lost": len(slots) - len(cut) - len(scored),
            "late": result.late,
            "scored": len(scored),
            "unscored": sum(scores.counts[s] for s in _FAILED),
            "errors": scores.counts["error"],
            "timeouts": scores.counts["timeout"],
        }
        seconds = {"generate": middle - start, "score": score}
        return Sampled([*cut, *scored], {k: float(v) for k, v in counts.items()}, seconds)

    def verdict_metrics(self) -> tuple[dict[str, float], dict[str, float]]:
        """What verdicts cost since the pool last forgot: metrics, the same on every rank, and this rank's seconds.

        A collective.
        """
        stats = self.pool.stats
        own = {"answers": stats.answers, "hits": stats.hits, "restarts": stats.restarts}
        sums = collectives.all_reduce_sum({name: float(value) for name, value in own.items()})
        metrics = {
            "verdict_hit_share": sums["hits"] / (sums["answers"] or 1.0),
            "reward_worker_restarts": sums["restarts"],
        }
        return metrics, {"verdict_latency_max": stats.latency_max_s}

    def stuck(self) -> bool:
        """Whether the engine of any rank was given up; all ranks get the same answer."""
        return bool(collectives.all_reduce_max({"stuck": float(self.engine.stuck)})["stuck"])

    def check_stuck(self, state: str) -> None:
        """Raise UserError where `stuck`; a collective. state: what is saved of the run."""
        if self.stuck():
            raise UserError(
                f"a rollout engine did not stop when told to (its rank is named above); {state}: start the same "
                "command again to go on"
            )

    def _tell(self, raised: Mapping[str, str]) -> None:
        """Say on stderr, once in a run, which verifiers raised; the first rank that has one prints it. A collective."""
        what = {code(text): f"{text}: {reason}" for text, reason in raised.items()}
        own = [key for key in what if key not in self.told]
        ranks = collectives.all_gather(own)
        for rank, key in ((rank, key) for rank, keys in enumerate(ranks) for key in keys):
            if key not in self.told and rank == self.grid.rank:
                with contextlib.suppress(OSError):  # nobody reads the pipe any more
                    print(what[key], file=sys.stderr, flush=True)
            self.told.add(key)


def _generated(result: GenerationResult, usage: KvUsage | None) -> dict[str, float]:
    """Return the values that the span of a generate call records: its number of new tokens and the use of the cache."""
    before = sum(len(r.token_ids) for request in result.requests for r in request.begun)
    there = sum(len(r.token_ids) for group in result.rollouts for r in group)
    found = {"tokens": float(max(there - before, 0))}  # negative if continued rollouts were lost
    if usage:
        found |= {"kv_peak": usage.peak, "kv_mean": usage.mean, "kv_turns": float(usage.turns)}
        found |= {"prompt_tokens": float(usage.prompt_tokens), "prompt_found": float(usage.prompt_found)}
    return found


def _check_distinct(asked: Sequence[Request], rollouts: Sequence[Sequence[Rollout]], if_repeating: str) -> None:
    """Raise UserError, on every rank, where rollouts of any ranks were drawn by the same random numbers."""
    hashes, names = improbable_rollouts(asked, rollouts)
    found, counts = torch.cat(collectives.all_gather(hashes)).unique(return_counts=True)
    again = set(found[counts > 1].tolist())
    if again:
        own = [name for name, value in zip(names, hashes.tolist(), strict=True) if value in again]
        raise UserError(
            f"{len(again)} responses came several times for one prompt, which chance forbids"
            f"{f' ({own[0]})' if own else ''}: the same random numbers were drawn by {if_repeating}"
        )


def check_lost(what: str, lost: float, asked: float, most: float) -> None:
    """Raise UserError where more than the share `most` (config key rollout.max_lost_share) of the rollouts was lost."""
    if lost > most * asked:
        raise UserError(
            f"{what}: {lost:.0f} of {asked:.0f} rollouts were lost, more than rollout.max_lost_share = {most:g}: "
            "see which were late (above), mend the engine or raise rollout.timeout_s"
        )


def check_scored(what: str, unscored: float, scored: float) -> None:
    """Raise UserError where more than the share MOST_UNSCORED of the responses has no verdict."""
    if unscored > MOST_UNSCORED * scored:
        raise UserError(
            f"{what}: the verifiers failed on {unscored:.0f} of {scored:.0f} responses (timeout, crash, no finite "
            "number, or an exception on the reference answer too): most rewards mean nothing; mend the verifier or "
            "raise reward.timeout_s"
        )
