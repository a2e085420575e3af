"""What a run records of its rollouts for people to read: run.dir/rollouts (record.files, docs/rollouts.md).

A row for every group of a step; of some groups, and of all held-out prompts, the rollouts themselves. Nothing that is
trained on depends on it, and nothing travels for it: each rank writes what it sampled itself.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import torch
from torch import Tensor

from megatron_brorl import rollout_log
from megatron_brorl.config.schema import Config, RunConfig
from megatron_brorl.rewards.extract import extract
from megatron_brorl.rewards.registry import entry
from megatron_brorl.rewards.scoring import scores_cut_off, without_stop
from megatron_brorl.rollout_log import GROUPS, ROLLOUTS
from megatron_brorl.train.groups import Outcomes, trained
from megatron_brorl.types import OpenGroup, ScoredRollout

MAX_TOKENS = 2**20  # tokens recorded per step and per evaluation


def recorded(groups: Sequence[OpenGroup], outcomes: Outcomes, config: RunConfig, every: bool = False) -> Tensor:
    """Which rollouts are recorded whole, bool [groups, N]; the same on every rank.

    Of the closed groups the run.record_groups whose prompts' ids have the smallest hashes, so that a prompt that comes
    again is likely to be followed; of all groups with `every`. Of each the first siblings, as many as keep all of them
    within MAX_TOKENS.
    """
    among = range(len(groups)) if every else outcomes.closed
    chosen = sorted(among, key=lambda g: (rollout_log.prompt_sort_key(groups[g].prompt.id), g))
    chosen = chosen if every else chosen[: config.record_groups]

    where = torch.zeros_like(outcomes.ended)
    where[chosen] = outcomes.ended[chosen]
    tokens = (outcomes.tokens * where).sum(0).cumsum(0)  # of the siblings up to each
    return where & (tokens <= MAX_TOKENS)


def take_recorded(rows: Sequence[ScoredRollout], where: Tensor) -> list[ScoredRollout]:
    """Those of this rank's rows that are recorded; where: bool [groups, N]."""
    found = []
    for row in rows:
        r = row.rollout
        if r.index < where.shape[1] and where[row.group, r.index]:
            # Clones, so that a few rollouts do not keep the tensors of a whole step alive.
            found.append(replace(row, rollout=replace(r, token_ids=r.token_ids.clone(), log_probs=r.log_probs.clone())))
    return found


@dataclass(frozen=True)
class Recorder:
    """Writes what was sampled, on every rank. A disk that takes nothing is told of, and never ends the run."""

    folder: Path
    config: Config
    decode: Callable[[list[int]], str]  # the tokenizer's
    stop_ids: Sequence[int]  # tokens that end a response, and are not part of its text
    rank: int
    told: list[str] = field(default_factory=list)  # of what could not be written: the first time

    def step(
        self,
        step: int,
        groups: Sequence[OpenGroup],
        outcomes: Outcomes,
        rows: Sequence[ScoredRollout],
        advantages: Tensor,
    ) -> float:
        """Record a step; returns the seconds that this rank took.

        rows: take_recorded of this rank's. advantages: [groups, N].
        """
        begun, algo = time.monotonic(), self.config.algo
        used = trained(outcomes, algo.overlong_filter)
        boosts = algo.correct_boost * outcomes.right
        own = (advantages + boosts).masked_fill(~used, float("nan"))
        where = recorded(groups, outcomes, self.config.run)
        self._write(rollout_log.Moment("step", step), groups, outcomes, where, outcomes.closed, rows, own)
        return time.monotonic() - begun

    def evaluation(
        self, steps: int, groups: Sequence[OpenGroup], outcomes: Outcomes, rows: Sequence[ScoredRollout]
    ) -> None:
        """Record an evaluation after so many steps. rows: all of this rank's."""
        where = recorded(groups, outcomes, self.config.run, every=True)
        nothing = torch.full_like(outcomes.rewards, float("nan"))
        every, moment = range(len(groups)), rollout_log.Moment("evaluation", steps)
        self._write(moment, groups, outcomes, where, every, take_recorded(rows, where), nothing)

    def _write(
        self,
        moment: rollout_log.Moment,
        groups: Sequence[OpenGroup],
        outcomes: Outcomes,
        where: Tensor,
        listed: Sequence[int],
        rows: Sequence[ScoredRollout],
        advantages: Tensor,
    ) -> None:
        try:
            if rows:
                own = sorted(rows, key=lambda row: (row.group, row.rollout.index))
                rollout_log.write_rollouts(self.folder, moment, self.rank, self._rollouts(own, groups, advantages))
            # Last, for it says that the moment is there.
            if self.rank == 0:
                rollout_log.write_groups(self.folder, moment, group_table(groups, outcomes, where, listed))
        except OSError as e:
            if self.told:
                return
            self.told.append(f"warning: {self.folder}: {moment} is not recorded: {e.strerror or e}; training goes on")
            with contextlib.suppress(OSError):  # stderr may be a file on the same full disk
                print(*self.told, file=sys.stderr, flush=True)

    def _rollouts(self, rows: Sequence[ScoredRollout], groups: Sequence[OpenGroup], advantages: Tensor) -> pa.Table:
        """schema.ROLLOUTS of the rows; advantages: [groups, N], nan: not trained on."""
        # Texts as the verifiers got them. Siblings repeat one another: each text is looked at once.
        seen: dict[tuple[str, bytes], tuple[str, str | None]] = {}
        worth, records = advantages.tolist(), []
        # An evaluation does not ask the engine for log-probabilities.
        no_log_probs = any(bool(row.rollout.log_probs.isnan().any()) for row in rows)
        for row in rows:
            ids, verifier = without_stop(row.rollout.token_ids, self.stop_ids), groups[row.group].prompt.verifier
            key = verifier, ids.numpy().tobytes()
            if key not in seen:
                seen[key] = self._read(ids.tolist(), verifier)
            text, answer = seen[key]

            # The answer of a response that was cut off may not have been judged (rewards.scoring).
            config = self.config.reward
            if row.rollout.finish == "length" and not scores_cut_off(entry(verifier, "verifier", config), config):
                answer = None
            own = worth[row.group][row.rollout.index]
            records.append(
                {
                    "prompt_id": _valid(groups[row.group].prompt.id),
                    "text": text,
                    "answer": answer,
                    "advantage": None if own != own else own,
                    "token_ids": row.rollout.token_ids.tolist(),
                    "log_probs": None if no_log_probs else row.rollout.log_probs.tolist(),
                    **_columns(row),
                }
            )
        return pa.Table.from_pylist(records, ROLLOUTS)

    def _read(self, ids: list[int], verifier: str) -> tuple[str, str | None]:
        """Return the text and the answer in it; ids: without the token that ended the response."""
        text = self.decode(ids)
        judged_by = entry(verifier, "verifier", self.config.reward)
        answer = extract(text, judged_by.find, judged_by.max_chars).answer
        return _valid(text) or "", _valid(answer)


def _columns(row: ScoredRollout) -> dict[str, object]:
    """What a rollout itself says of them."""
    r, score = row.rollout, row.score
    return {
        "group": row.group,
        "sibling": r.index,
        "reward": row.reward,
        "right": row.right,
        # Of a rollout that waited in a checkpoint of an older version nothing more is known.
        "score": score.reward if score else None,
        "parts": list(score.parts.items()) if score else None,
        "reason": _valid(score.reason) if score else None,
        "status": score.status if score else None,
        "finish": r.finish,
        "tokens": len(r.token_ids),
        "versions": [{"version": version, "tokens": tokens} for version, tokens in r.spans],
    }


def group_table(groups: Sequence[OpenGroup], outcomes: Outcomes, where: Tensor, listed: Sequence[int]) -> pa.Table:
    """schema.GROUPS of the `listed` groups; where: bool [groups, N], what is recorded whole."""
    kept, rows = set(outcomes.kept), []
    for g in listed:
        prompt, ended = groups[g].prompt, outcomes.ended[g]
        rewards, tokens = outcomes.rewards[g][ended].double(), outcomes.tokens[g][ended].double()
        count, right, whole = len(rewards), int(outcomes.right[g][ended].sum()), int(where[g].sum())

        rows.append(
            {
                "group": g,
                "prompt_id": _valid(prompt.id),
                "verifier": _valid(str(prompt.metadata.get("source_dataset", prompt.verifier))),
                "rollouts": count,
                "right": right,
                "distinct": len(outcomes.answers[g][ended].unique()),
                "reward": float(rewards.mean()) if count else None,
                "tokens": float(tokens.mean()) if count else None,
                "outcome": "lost" if not count else "wrong" if not right else "right" if right == count else "mixed",
                "trained": g in kept,
                "recorded": whole,
                "prompt": _valid(prompt.text) if whole else None,
                "reference": _valid(prompt.answer) if whole else None,
            }
        )

    # With the declared types, also where a column has nothing but nulls.
    return pa.Table.from_pylist(rows, GROUPS)


def _valid(text: str | None) -> str | None:
    """The text without halves of surrogate pairs, which a JSON file may hold and UTF-8 cannot."""
    return None if text is None else text.encode("utf-8", "replace").decode()
