"""Sample and score rollouts: from groups of prompts to rollouts with rewards on this rank."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron_brorl.config.schema import RewardConfig
from megatron_brorl.data.tokenizers import Tokenizer
from megatron_brorl.errors import StepError, UserError, print_error
from megatron_brorl.parallel import collectives
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.rewards.extract import answer_hash
from megatron_brorl.rewards.scoring import Scorer
from megatron_brorl.rewards.worker_pool import RewardPool
from megatron_brorl.rollout.engine import KvUsage, Request, Sampling
from megatron_brorl.rollout.sampler import Slot, SlotSupply, WorkStealing, deal, improbable_rollouts, requests
from megatron_brorl.rollout.watchdog import GenerationResult, Watchdog
from megatron_brorl.tracking.timeline import count, span
from megatron_brorl.types import PromptGroup, Rollout, ScoredRollout

MAX_UNSCORED = 0.5  # Rewards mean nothing if the verifier fails on a larger share.
_FAILED = ("timeout", "broken", "invalid", "crash")  # statuses of responses that count as unscored


@dataclass(frozen=True)
class RolloutRunner:
    """Samples and scores rollouts with the engine and the verifiers of one rank."""

    engine: Watchdog
    pool: RewardPool
    tokenizer: Tokenizer
    reward: RewardConfig
    seed: int
    grid: Grid
    max_lost_share: float  # config key rollout.max_lost_share
    work_stealing: WorkStealing | None = None  # None: every rank samples only its own share
    reported: dict[str, str] = field(default_factory=dict)  # message about a verifier that raises -> its first reason

    def sample(
        self,
        new: Sequence[Slot],
        groups: Sequence[PromptGroup],
        sampling: Sampling,
        partial: Mapping[Slot, Rollout] | None = None,
        partial_per_rank: Sequence[int] | None = None,
        renew_limit: bool = False,
    ) -> tuple[list[ScoredRollout], dict[str, float], dict[str, float]]:
        """Sample and score this rank's share of the rollouts of `groups`. Collective; all ranks return together.

        new: the rollouts to begin, of all ranks, in (group, rollout) order. partial: this rank's partial rollouts,
        which continue. partial_per_rank: their number on every rank. renew_limit: see Watchdog.generate.

        Returns this rank's rollouts without the lost ones, its counts and its seconds. A "cut" rollout is lost unless
        sampling.tokens_per_call is set. Then it continues in the next step.

        Counts: rollouts "requested", "lost" and "slow"; "responses", and "unscored" ones, on which the verifier failed;
        "errors" and "timeouts" of a verifier that can score other answers; "turns", tool "calls" and "malformed" ones
        of the responses, and "environments" that were lost. Seconds: "generate", and "score" after generation.
        """
        start = time.monotonic()
        partial = partial or {}
        shares = deal(new, partial_per_rank or [0] * self.grid.world_size)
        own = [*partial, *shares[self.grid.rank]]
        # With work stealing, the engine begins new rollouts of any rank when it has room. Partial ones stay here.
        shared = self.work_stealing.begin(shares, self.grid.rank) if self.work_stealing else None
        # Consecutive rollouts of one prompt are one request, so that the engine computes the prompt once.
        first_requests, group_of = requests(list(partial) if shared else own, groups, partial, self.seed)
        prompts = [request.prompt for request in first_requests]

        def take_requests(slots: Sequence[Slot]) -> list[Request]:
            # The engine's thread calls this before it reports any of these rollouts.
            more, more_groups = requests(slots, groups, {}, self.seed)
            group_of.extend(more_groups)
            prompts.extend(request.prompt for request in more)
            return more

        longest_prompt = max((len(group.prompt.token_ids) for group in groups), default=0)
        supply = SlotSupply(shared, take_requests, len(new), longest_prompt) if shared else None
        with Scorer(prompts, self.tokenizer.decode, sampling.stop_ids, self.pool, self.reward) as scorer:
            ended = itertools.count(1)

            # Rollouts are scored while others are still being sampled.
            def finished(request: int, rollout: Rollout) -> None:
                scorer.finished(request, rollout)
                count(next(ended), len(own))

            with span("generate", allowance_s=self.engine.timeout_s + self.engine.grace_s) as values:
                count(0, len(own))
                result = self.engine.generate(first_requests, sampling, finished, supply, renew_limit)
            values |= _generation_counts(result, self.engine.kv_usage())
            # Repeated rollouts would count as independent ones, so this check comes before any score is used.
            _check_distinct(result.requests, result.rollouts, self.engine.engine.duplicate_advice)
            generated = time.monotonic()

            complete = [(i, r) for i, rollouts in enumerate(result.rollouts) for r in rollouts if r.finish != "cut"]
            with span("score", allowance_s=self.reward.timeout_s):
                scores = scorer.scores([(i, r.index) for i, r in complete])
        # Answers become hashes, because ranks exchange tables of numbers.
        columns = scores.rewards.tolist(), scores.right, map(answer_hash, scores.answers), scores.results
        scored = [ScoredRollout(group_of[i], r, *score) for (i, r), *score in zip(complete, *columns, strict=True)]
        score_seconds = time.monotonic() - generated

        cut: list[ScoredRollout] = []
        if sampling.tokens_per_call:
            # strict=False, because a stuck engine may still extend group_of.
            for group, rollouts in zip(group_of, result.rollouts, strict=False):
                cut += [ScoredRollout(group, r, float("nan"), right=False) for r in rollouts if r.finish == "cut"]

        # Wait for the other ranks here, so that the seconds above are this rank's own.
        self.grid.barrier()
        self.report_errors(scores.raised)
        counts = {
            "requested": len(own),
            "lost": len(own) - len(cut) - len(scored),
            "slow": result.late,
            "responses": len(scored),
            "unscored": sum(scores.counts[s] for s in _FAILED),
            "errors": scores.counts["error"],
            "timeouts": scores.counts["timeout"],
            **_episode_counts(result),
        }
        seconds = {"generate": generated - start, "score": score_seconds}
        return [*cut, *scored], {k: float(v) for k, v in counts.items()}, seconds

    def reward_metrics(self) -> dict[str, float]:
        """Return metrics of scoring since pool.reset(), the same on every rank. Collective."""
        stats = self.pool.stats
        counts = {"answers": stats.answers, "hits": stats.hits, "restarts": stats.restarts}
        sums = collectives.all_reduce_sum({name: float(value) for name, value in counts.items()})
        return {
            "score_cache_hit_share": sums["hits"] / (sums["answers"] or 1.0),
            "reward_worker_restarts": sums["restarts"],
        }

    def stuck(self) -> bool:
        """Return whether the engine of any rank is stuck. Collective."""
        return bool(collectives.all_reduce_max({"stuck": float(self.engine.stuck)})["stuck"])

    def raise_if_stuck(self, state: str) -> None:
        """Raise UserError if an engine is stuck. Collective. state: text on the saved state, for the message."""
        if self.stuck():
            raise UserError(
                f"a rollout engine did not stop when told to (its rank is named above); {state}: run the same "
                "command again to continue"
            )

    def report_errors(self, raised: Mapping[str, str]) -> None:
        """Print each verifier that raised once in a run, on the first rank that has it. Collective."""
        ranks = collectives.all_gather({text: why for text, why in raised.items() if text not in self.reported})
        for rank, reasons in enumerate(ranks):
            for text, reason in reasons.items():
                if text not in self.reported and rank == self.grid.rank:
                    print_error(f"{text}: {reason}")
                self.reported.setdefault(text, reason)


def _generation_counts(result: GenerationResult, usage: KvUsage | None) -> dict[str, float]:
    """Return the values that the span of a generate call records: its number of new tokens and the use of the cache."""
    before = sum(r.sampled_tokens for request in result.requests for r in request.begun)
    total = sum(r.sampled_tokens for rollouts in result.rollouts for r in rollouts)
    counts = {"tokens": float(max(total - before, 0))}  # The difference is negative if continued rollouts were lost.
    if usage:
        counts |= {"kv_peak": usage.peak, "kv_mean": usage.mean, "kv_turns": float(usage.steps)}
        counts |= {"prompt_tokens": float(usage.prompt_tokens), "prompt_found": float(usage.cached_prompt_tokens)}
    return counts


def _episode_counts(result: GenerationResult) -> dict[str, int]:
    """Return the numbers of turns, tool calls, malformed calls and sequences of ended episodes, and of lost ones."""
    rollouts = [r for of_request in result.rollouts for r in of_request if r.episode is not None]
    episodes = [r.episode for r in rollouts if r.episode and r.finish != "cut"]
    return {
        "turns": sum(e.turns for e in episodes),
        "calls": sum(e.calls for e in episodes),
        "malformed": sum(e.malformed for e in episodes),
        "sequences": sum(len(e.starts) for e in episodes),
        # The score of an unfinished rollout is the reason for which it was lost (rollout.turns).
        "environments": sum(r.finish == "cut" and r.episode.score is not None for r in rollouts if r.episode),
    }


def _check_distinct(requested: Sequence[Request], rollouts: Sequence[Sequence[Rollout]], duplicate_advice: str) -> None:
    """Raise UserError on every rank if rollouts were drawn with the same random numbers, on any ranks."""
    hashes, names = improbable_rollouts(requested, rollouts)
    values, counts = torch.cat(collectives.all_gather(hashes)).unique(return_counts=True)
    repeated = set(values[counts > 1].tolist())
    if repeated:
        own = [name for name, value in zip(names, hashes.tolist(), strict=True) if value in repeated]
        raise UserError(
            f"{len(repeated)} responses came several times for one prompt, which is practically impossible"
            f"{f' ({own[0]})' if own else ''}: the same random numbers were drawn by {duplicate_advice}"
        )


def check_lost(what: str, lost: float, requested: float, most: float) -> None:
    """Raise StepError if more than the share `most` (rollout.max_lost_share) of the rollouts is lost."""
    if lost > most * requested:
        raise StepError(
            f"{what}: {lost:.0f} of {requested:.0f} rollouts were lost, more than rollout.max_lost_share = {most:g}: "
            "see above which were late, fix the engine or raise rollout.timeout_s"
        )


def check_scored(what: str, counts: Mapping[str, float], reported: Mapping[str, str]) -> None:
    """Raise StepError if more than the share MAX_UNSCORED of the responses has no reward, or if all of them raised.

    counts: the sums over ranks of RolloutRunner.sample. reported: RolloutRunner.reported.
    """
    scored, unscored = counts["responses"], counts["unscored"]
    failed = unscored + counts["errors"]
    if unscored > MAX_UNSCORED * scored or (scored and failed == scored):
        first_error = "".join(f"{text}: {reason}; " for text, reason in [*reported.items()][:1])
        raise StepError(
            f"{what}: the verifiers failed on {failed:.0f} of {scored:.0f} responses (exception, timeout, crash or no "
            f"finite number): most rewards mean nothing; {first_error}fix the verifier or raise reward.timeout_s"
        )
