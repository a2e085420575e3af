"""A few held-out samples as a person reads them beside the figures of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_brorl import rollout_log
from megatron_brorl.rewards.scoring import without_stop
from megatron_brorl.rollout_log import one_line
from megatron_brorl.train.evaluate import See
from megatron_brorl.train.groups import Outcomes
from megatron_brorl.train.recorder import Recorder
from megatron_brorl.types import OpenGroup, ScoredRollout

_SAMPLES = 3
_MOST = 240  # characters of a prompt or a response


def look_at(
    recorder: Recorder | None,
    step: int,
    decode: Callable[[list[int]], str],
    stop_ids: Sequence[int],
    note: Callable[[str], None],
) -> See:
    """What is done with the samples of an evaluation beside its figures: kept for people to read, and a few told."""

    def see(groups: Sequence[OpenGroup], rows: Sequence[ScoredRollout], outcomes: Outcomes) -> None:
        if recorder:
            recorder.evaluation(step, groups, outcomes, rows)
        for text in sample_lines(groups, rows, decode, stop_ids):
            note(f"held-out {text}")

    return see


def sample_lines(
    groups: Sequence[OpenGroup],
    rows: Sequence[ScoredRollout],
    decode: Callable[[list[int]], str],
    stop_ids: Sequence[int],
) -> list[str]:
    """Three samples of three prompts, each with its verdict and the reason; the same prompts at every evaluation.

    rows: this rank's. Fewer where it has rollouts of fewer prompts.
    """
    first: dict[int, ScoredRollout] = {}
    for row in sorted(rows, key=lambda row: row.rollout.index, reverse=True):
        first[row.group] = row  # the first sibling stays
    chosen = sorted(first, key=lambda g: (rollout_log.prompt_sort_key(groups[g].prompt.id), g))[:_SAMPLES]

    found = []
    for number, g in enumerate(chosen, start=1):
        prompt, row = groups[g].prompt, first[g]
        text = decode(without_stop(row.rollout.token_ids, stop_ids).tolist())
        lines = [
            f"sample {number}, prompt {one_line(prompt.id)}: {verdict_line(row)}",
            f"  prompt     {one_line(prompt.text, _MOST)}",
            f"  response   {one_line(text, _MOST)}",
        ]
        if prompt.answer is not None:
            lines.append(f"  reference  {one_line(prompt.answer, _MOST)}")
        found.append("\n".join(lines))
    return found


def verdict_line(row: ScoredRollout) -> str:
    """right or wrong, the reward where it is in between, and why."""
    word = "right" if row.right else "wrong"
    parts = [word if row.reward == float(row.right) else f"{word} (reward {row.reward:.3g})"]
    if row.rollout.finish == "length":
        parts.append("cut off at rollout.max_tokens")
    reason = one_line(row.score.reason, _MOST) if row.score else ""
    if reason not in ("", word, "cut off"):
        parts.append(reason)
    return ", ".join(parts)
