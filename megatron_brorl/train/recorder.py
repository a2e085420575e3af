"""Write rollouts for people to read to run.dir/rollouts (rollout_log, docs/rollouts.md).

Every group of a step has one row. For some groups and for all held-out prompts, the rollouts themselves are written,
each by the rank that sampled it. Training does not depend on these files.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from megatron_brorl import rollout_log
from megatron_brorl.algo.advantages import has_signal
from megatron_brorl.config.schema import Config, RunConfig
from megatron_brorl.errors import warn
from megatron_brorl.rewards.extract import extract
from megatron_brorl.rewards.registry import entry
from megatron_brorl.rewards.scoring import scores_cut_off, without_stop
from megatron_brorl.rollout_log import GROUPS, ROLLOUTS, LogEntry, one_line
from megatron_brorl.train.carried_groups import with_own_tensors
from megatron_brorl.train.groups import Outcomes
from megatron_brorl.types import PromptGroup, Rollout, ScoredRollout

MAX_TOKENS = 2**20  # tokens recorded per step and per evaluation
_SAMPLES = 3  # held-out samples on the console
_MAX_CHARS = 240  # of a prompt or a response on the console


def choose_recorded(
    groups: Sequence[PromptGroup], outcomes: Outcomes, config: RunConfig, all_groups: bool = False
) -> Tensor:
    """Return which rollouts to write, bool [groups, N]; the same on every rank.

    The groups are the run.record_groups closed ones whose prompt ids have the smallest hashes, so the same prompts are
    likely to be written in later steps, too. With all_groups they are all groups. Of each group the first rollouts are
    written, as many as fit MAX_TOKENS over all groups.
    """
    candidates = range(len(groups)) if all_groups else outcomes.closed
    chosen = sorted(candidates, key=lambda g: (rollout_log.prompt_sort_key(groups[g].prompt.id), g))
    chosen = chosen if all_groups else chosen[: config.record_groups]

    in_chosen_group = torch.zeros_like(outcomes.ended)
    in_chosen_group[chosen] = outcomes.ended[chosen]
    tokens = (outcomes.tokens * in_chosen_group).sum(0).cumsum(0)  # [N]: of siblings 0 to i of the chosen groups
    return in_chosen_group & (tokens <= MAX_TOKENS)


def select_recorded(rollouts: Sequence[ScoredRollout], is_recorded: Tensor) -> list[ScoredRollout]:
    """Return copies of this rank's rollouts that are written; is_recorded: bool [groups, N]."""
    n = is_recorded.shape[1]
    chosen = is_recorded.tolist()
    return [with_own_tensors(r) for r in rollouts if r.rollout.index < n and chosen[r.group][r.rollout.index]]


@dataclass(frozen=True)
class Recorder:
    """Writes rollouts on every rank. If a write fails, it prints a warning once and training continues."""

    folder: Path
    config: Config
    decode: Callable[[list[int]], str]  # of the tokenizer
    stop_ids: Sequence[int]  # tokens that end a response, and are not part of its text
    rank: int
    warnings: list[str] = field(default_factory=list)  # printed so far

    def step(
        self,
        step: int,
        groups: Sequence[PromptGroup],
        outcomes: Outcomes,
        rollouts: Sequence[ScoredRollout],
        advantages: Tensor,
        is_trained: Tensor,
    ) -> None:
        """Write the rollouts of a step. rollouts: from select_recorded. advantages, is_trained: [groups, N]."""
        advantages = advantages.masked_fill(~is_trained, float("nan"))
        is_recorded = choose_recorded(groups, outcomes, self.config.run)
        self._write(LogEntry("step", step), groups, outcomes, is_recorded, outcomes.closed, rollouts, advantages)

    def evaluation(
        self, steps: int, groups: Sequence[PromptGroup], outcomes: Outcomes, rollouts: Sequence[ScoredRollout]
    ) -> None:
        """Write the rollouts of an evaluation after `steps` steps. rollouts: all of this rank's."""
        is_recorded = choose_recorded(groups, outcomes, self.config.run, all_groups=True)
        no_advantages = torch.full_like(outcomes.rewards, float("nan"))
        own = select_recorded(rollouts, is_recorded)
        listed = range(len(groups))
        self._write(LogEntry("evaluation", steps), groups, outcomes, is_recorded, listed, own, no_advantages)

    def _write(
        self,
        log_entry: LogEntry,
        groups: Sequence[PromptGroup],
        outcomes: Outcomes,
        is_recorded: Tensor,
        listed: Sequence[int],
        rollouts: Sequence[ScoredRollout],
        advantages: Tensor,
    ) -> None:
        try:
            if rollouts:
                ordered = sorted(rollouts, key=lambda r: (r.group, r.rollout.index))
                rollout_log.write_rollouts(self.folder, log_entry, self.rank, self._table(ordered, groups, advantages))
            # The group table comes last, because readers take it as the sign that the entry is complete.
            if self.rank == 0:
                rollout_log.write_groups(self.folder, log_entry, group_table(groups, outcomes, is_recorded, listed))
        except OSError as e:
            if not self.warnings:
                message = f"{self.folder}: {log_entry} is not recorded: {e.strerror or e}; training continues"
                self.warnings.append(message)
                warn(message)

    def _table(self, rollouts: Sequence[ScoredRollout], groups: Sequence[PromptGroup], advantages: Tensor) -> pa.Table:
        """Return a table of schema ROLLOUTS. advantages: [groups, N], nan for rollouts that are not trained on."""
        # Rollouts of a group repeat each other, so each text is decoded once.
        decoded: dict[tuple[str, bytes, Any], dict[str, Any]] = {}
        advantage_of = advantages.tolist()
        records = []
        # An evaluation does not ask the engine for log-probabilities.
        no_log_probs = any(bool(r.rollout.log_probs.isnan().any()) for r in rollouts)
        for r in rollouts:
            verifier = groups[r.group].prompt.verifier
            episode = r.rollout.episode
            episode_key = None if episode is None else (episode.sampled.numpy().tobytes(), episode.starts, episode.text)
            key = verifier, without_stop(r.rollout.token_ids, self.stop_ids).numpy().tobytes(), episode_key
            if key not in decoded:
                decoded[key] = self._decode(r.rollout, verifier)
            texts = decoded[key]

            # The answer of a response that was cut off may not have been scored (rewards.scoring).
            config = self.config.reward
            if r.rollout.finish == "length" and not scores_cut_off(entry(verifier, "verifier", config), config):
                texts = {**texts, "answer": None}
            advantage = advantage_of[r.group][r.rollout.index]
            score = r.score  # A rollout that was restored from a checkpoint has none.
            records.append(
                {
                    "group": r.group,
                    "prompt_id": _valid(groups[r.group].prompt.id),
                    "sibling": r.rollout.index,
                    "reward": r.reward,
                    "right": r.right,
                    "score": score.reward if score else None,
                    "parts": list(score.parts.items()) if score else None,
                    "reason": _valid(score.reason) if score else None,
                    "status": score.status if score else None,
                    "finish": r.rollout.finish,
                    "tokens": len(r.rollout.token_ids),
                    "versions": [{"version": version, "tokens": tokens} for version, tokens in r.rollout.spans],
                    "advantage": None if advantage != advantage else advantage,
                    "token_ids": r.rollout.token_ids.tolist(),
                    "log_probs": None if no_log_probs else r.rollout.log_probs.tolist(),
                    "sampled": None if episode is None else episode.sampled.tolist(),
                    **texts,
                }
            )
        return pa.Table.from_pylist(records, ROLLOUTS)

    def _decode(self, rollout: Rollout, verifier: str) -> dict[str, Any]:
        """Return the columns text, answer and turns. The answer is from the last sampled turn, or an agent's text."""

        def text_of(token_ids: Tensor) -> str:
            return self.decode(without_stop(token_ids, self.stop_ids).tolist())

        text = answer_text = text_of(rollout.token_ids)
        turns = None
        if episode := rollout.episode:
            turns = []
            begin = 0
            for sampled, ids in rollout.parts():
                sequence = max(bisect.bisect(episode.starts, begin) - 1, 0)
                turns.append({"text": _valid(text_of(ids)), "sampled": sampled, "sequence": sequence})
                begin += len(ids)
            answer_text = next((str(turn["text"]) for turn in reversed(turns) if turn["sampled"]), "")
            answer_text = answer_text if episode.text is None else episode.text
        verifier_entry = entry(verifier, "verifier", self.config.reward)
        answer = extract(answer_text, verifier_entry.find, verifier_entry.max_chars).answer
        return {"text": _valid(text), "answer": _valid(answer), "turns": turns}


def group_table(groups: Sequence[PromptGroup], outcomes: Outcomes, recorded: Tensor, listed: Sequence[int]) -> pa.Table:
    """Return a table of schema GROUPS for the `listed` groups; recorded: bool [groups, N]."""
    kept = set(outcomes.kept)
    rows = []
    for g in listed:
        prompt = groups[g].prompt
        ended = outcomes.ended[g]
        rewards = outcomes.rewards[g][ended].double()
        tokens = outcomes.tokens[g][ended].double()
        count = len(rewards)
        right = int(outcomes.right[g][ended].sum())
        written = int(recorded[g].sum())
        mixed = count and (has_signal(rewards) or 0 < right < count)
        rows.append(
            {
                "group": g,
                "prompt_id": _valid(prompt.id),
                "task": _valid(prompt.task),
                "rollouts": count,
                "right": right,
                "distinct": len(outcomes.answers[g][ended].unique()),
                "reward": float(rewards.mean()) if count else None,
                "tokens": float(tokens.mean()) if count else None,
                "outcome": "lost" if not count else "mixed" if mixed else "right" if right else "wrong",
                "trained": g in kept,
                "recorded": written,
                "prompt": _valid(prompt.text) if written else None,
                "reference": _valid(prompt.answer) if written else None,
                "reward_counts": rewards.unique(return_counts=True)[1].tolist(),
            }
        )

    # The schema gives a type to columns that contain only nulls.
    return pa.Table.from_pylist(rows, GROUPS)


def _valid(text: str | None) -> str | None:
    """Replace unpaired surrogates, which a JSON file may contain and UTF-8 cannot encode."""
    return None if text is None else text.encode("utf-8", "replace").decode()


def sample_lines(
    groups: Sequence[PromptGroup],
    rollouts: Sequence[ScoredRollout],
    decode: Callable[[list[int]], str],
    stop_ids: Sequence[int],
) -> list[str]:
    """Return a sample of each of three prompts with its reward and the reason; the same prompts at every evaluation.

    rollouts: this rank's. There are fewer samples if it has rollouts of fewer prompts.
    """
    sample_of: dict[int, ScoredRollout] = {}  # by group, the rollout with the smallest index
    for r in sorted(rollouts, key=lambda r: r.rollout.index, reverse=True):
        sample_of[r.group] = r
    chosen = sorted(sample_of, key=lambda g: (rollout_log.prompt_sort_key(groups[g].prompt.id), g))[:_SAMPLES]

    samples = []
    for number, g in enumerate(chosen, start=1):
        prompt = groups[g].prompt
        text = decode(without_stop(sample_of[g].rollout.token_ids, stop_ids).tolist())
        lines = [
            f"sample {number}, prompt {one_line(prompt.id)}: {reward_line(sample_of[g])}",
            f"  prompt     {one_line(prompt.text, _MAX_CHARS)}",
            f"  response   {one_line(text, _MAX_CHARS)}",
        ]
        if prompt.answer is not None:
            lines.append(f"  reference  {one_line(prompt.answer, _MAX_CHARS)}")
        samples.append("\n".join(lines))
    return samples


def reward_line(scored: ScoredRollout) -> str:
    """Return "right" or "wrong", the reward if it is neither 1 nor 0, and the reason."""
    word = "right" if scored.right else "wrong"
    parts = [word if scored.reward == float(scored.right) else f"{word} (reward {scored.reward:.3g})"]
    if scored.rollout.finish == "length":
        parts.append("cut off at rollout.max_tokens")
    reason = one_line(scored.score.reason, _MAX_CHARS) if scored.score else ""
    if reason not in ("", word, "cut off"):
        parts.append(reason)
    return ", ".join(parts)
