"""Sampling and scoring: from open groups to rows with verdicts on this rank."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_brorl.config.schema import RewardConfig
from megatron_brorl.data.tokenizers import Tokenizer
from megatron_brorl.errors import UserError
from megatron_brorl.parallel import collectives
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.rewards.extract import code
from megatron_brorl.rewards.pool import RewardPool
from megatron_brorl.rewards.scoring import score_groups
from megatron_brorl.rollout.duplicates import improbable
from megatron_brorl.rollout.engine import Request, Sampling
from megatron_brorl.rollout.sampler import Slot, requests
from megatron_brorl.rollout.watchdog import Watchdog
from megatron_brorl.types import OpenGroup, Rollout, RolloutGroup, Row

_FAILED = ("timeout", "error", "invalid", "crash")


@dataclass(frozen=True)
class Sampled:
    """What this rank's share of a step came to."""

    rows: list[Row]  # without the lost ones; "cut" ones only where the sampling has a budget
    asked: int  # rollouts
    late: int
    scored: int  # responses
    unscored: int  # of which the verifier failed
    seconds: dict[str, float]  # "generate", "score"

    def counts(self) -> dict[str, float]:
        """What adds up over ranks."""
        lost = self.asked - len(self.rows)
        counts = {"asked": self.asked, "lost": lost, "late": self.late}
        return {k: float(v) for k, v in {**counts, "scored": self.scored, "unscored": self.unscored}.items()}


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

    def sample(
        self,
        slots: Sequence[Slot],
        groups: Sequence[OpenGroup],
        sampling: Sampling,
        begun: Mapping[Slot, Rollout] | None = None,
    ) -> Sampled:
        """This rank's share of the rollouts of `groups`; every rank calls it, and all leave it together.

        begun: "cut" rollouts among the slots, which go on. Rollouts that end up "cut" are lost unless sampling.budget
        says that they go on in the next step.
        """
        start = time.monotonic()
        asked, numbers = requests(slots, groups, begun or {}, self.seed)
        result = self.engine.generate(asked, sampling)
        _check_distinct(asked, result.rollouts)
        middle = time.monotonic()
        ended, texts, rows = [], [], []
        for number, request, rollouts in zip(numbers, asked, result.rollouts, strict=True):
            done = tuple(r for r in rollouts if r.finish != "cut")
            ended.append(RolloutGroup(request.prompt, done, self.engine.engine.version))
            texts.append(self._texts(done, sampling.stop_ids))
            if sampling.budget:
                rows += [Row(number, r, float("nan")) for r in rollouts if r.finish == "cut"]
        scored, verdicts = score_groups(ended, texts, self.pool, self.reward)
        for number, group in zip(numbers, scored, strict=True):
            found = zip(group.group.rollouts, group.rewards.tolist(), group.answers, strict=True)
            rows += [Row(number, rollout, reward, code(answer)) for rollout, reward, answer in found]
        score = time.monotonic() - middle
        self.grid.barrier()
        return Sampled(
            rows=rows,
            asked=len(slots),
            late=result.late,
            scored=sum(len(g.rollouts) for g in ended),
            unscored=sum(verdicts[s] for s in _FAILED),
            seconds={"generate": middle - start, "score": score},
        )

    def stuck(self) -> bool:
        """Whether the engine of any rank was given up; all ranks get the same answer."""
        return bool(collectives.all_reduce_max({"stuck": float(self.engine.stuck)})["stuck"])

    def _texts(self, rollouts: Sequence[Rollout], stop_ids: tuple[int, ...]) -> list[str]:
        """Responses as text without their stop token. Siblings repeat one another, so each text is decoded once."""
        cache: dict[tuple[int, ...], str] = {}
        texts = []
        for rollout in rollouts:
            ids = tuple(rollout.token_ids.tolist())
            if ids and ids[-1] in stop_ids:
                ids = ids[:-1]
            if ids not in cache:
                cache[ids] = self.tokenizer.decode(list(ids))
            texts.append(cache[ids])
        return texts


def _check_distinct(asked: Sequence[Request], rollouts: Sequence[Sequence[Rollout]]) -> None:
    """Raise UserError, on every rank, where siblings of any ranks were drawn by the same random numbers."""
    hashes, names = improbable(asked, rollouts)
    found, counts = collectives.all_gather_ids(hashes).unique(return_counts=True)
    again = set(found[counts > 1].tolist())
    if again:
        own = [name for name, value in zip(names, hashes.tolist(), strict=True) if value in again]
        raise UserError(
            f"{len(again)} responses came from several siblings, which chance forbids: engines draw the same random "
            f"numbers; choose another trtllm.sampler{f' ({own[0]})' if own else ''}"
        )


def check_lost(what: str, lost: float, asked: float, most: float) -> None:
    """Raise UserError where more than the share `most` (config key rollout.max_lost_share) of the rollouts was lost."""
    if lost > most * asked:
        raise UserError(
            f"{what}: {lost:.0f} of {asked:.0f} rollouts were lost, more than rollout.max_lost_share = {most:g} of them: "
            "see which were late (above), mend the engine or raise rollout.timeout_s"
        )
