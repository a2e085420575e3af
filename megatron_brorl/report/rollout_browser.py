"""Functions of `brorl rollouts`: select, print and export recorded rollouts."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from megatron_brorl.errors import UserError
from megatron_brorl.files import writing
from megatron_brorl.rollout_log import LogEntry, entries, filter_rows, one_line, printable, read_groups, read_rollouts

Row = Mapping[str, Any]  # of rollout_log.GROUPS or ROLLOUTS
EXPORTS = (".jsonl", ".parquet")
_MAX_ANSWERS = 20  # listed for a prompt
_MAX_CHARS = 100  # characters of an answer or a prompt in a table


@dataclass(frozen=True)
class Recorded:
    """Groups and rollouts of one moment, possibly filtered."""

    moment: LogEntry
    groups: pa.Table  # rollout_log.GROUPS
    rollouts: pa.Table  # rollout_log.ROLLOUTS

    def filtered(self, prompt: str | None, mixed: bool, right: bool, wrong: bool, contains: str) -> Recorded:
        """Return the groups and rollouts that pass. A filter of responses removes groups without a passing response.

        prompt: the id of one prompt. mixed: only prompts with right and wrong responses. right: only right responses;
        `right` and `wrong` together select both. contains: text that a response must contain, ignoring case.
        """
        groups = self.groups
        if prompt is not None:
            groups = filter_rows(groups, "prompt_id", [prompt])
        if mixed:
            groups = filter_rows(groups, "outcome", ["mixed"])
        rollouts = filter_rows(self.rollouts, "group", groups["group"].to_pylist())
        if right != wrong:
            rollouts = filter_rows(rollouts, "right", [right])
        if contains:
            rollouts = rollouts.filter(pc.match_substring(rollouts["text"], contains, ignore_case=True))
        if right != wrong or contains:
            groups = filter_rows(groups, "group", rollouts["group"].unique().to_pylist())
        return replace(self, groups=groups, rollouts=rollouts)


def read(folder: Path, kind: str, number: int | None, prompt: str | None) -> Recorded:
    """Read the rollouts of one step or evaluation.

    kind: "step", "evaluation" or "", which prefers evaluations to steps. number: of a step, from 1, or the steps before
    an evaluation; None selects the last moment of the kind. prompt: a prompt id; without a number, it selects the last
    moment with recorded rollouts of this prompt. Raises UserError if the moment or the prompt was not recorded.
    """
    saved = entries(folder)
    matches = [m for m in saved if kind in ("", m.kind) and number in (None, m.shown)]
    if not matches:
        raise UserError(f"{folder}: no {kind}{'' if number is None else f' {number}'} is recorded; try {listed(saved)}")
    if prompt is None or number is not None:
        return Recorded(matches[-1], read_groups(folder, matches[-1]), read_rollouts(folder, matches[-1]))
    ids: dict[str, None] = {}
    for moment in reversed(matches):
        groups = read_groups(folder, moment)
        prompt_groups = filter_rows(groups, "prompt_id", [prompt])
        if len(prompt_groups) and pc.max(prompt_groups["recorded"]).as_py():
            return Recorded(moment, groups, read_rollouts(folder, moment))
        ids |= dict.fromkeys(groups.filter(pc.greater(groups["recorded"], 0))["prompt_id"].to_pylist())
    near = difflib.get_close_matches(prompt, ids, n=1, cutoff=0) or ["unknown"]
    raise UserError(f"{folder}: no rollout of prompt {prompt!r} is recorded; the most similar id is {near[0]}")


def listed(moments: Sequence[LogEntry]) -> str:
    """Return the numbers of recorded steps and evaluations in words."""
    parts = []
    for kind in ("step", "evaluation"):
        numbers = [m.shown for m in moments if m.kind == kind]
        if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
            parts.append(f"{kind}s {numbers[0]} to {numbers[-1]}")
        elif numbers:
            parts.append(f"{kind}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}")
    return " and ".join(parts)


def export(recorded: Recorded, path: Path) -> int:
    """Write the rollouts, each with its prompt, as .jsonl or .parquet, atomically. Return their number.

    Raises UserError for another ending, if there is nothing to write, and if the file cannot be written.
    """
    if path.suffix not in EXPORTS:
        raise UserError(f"{path}: unknown format; use one of the endings {', '.join(EXPORTS)}")
    table = _joined(recorded)
    if not len(table):
        raise UserError(f"{path}: nothing to export: no recorded rollout of {recorded.moment} passes the filters")
    with writing(path) as aside:
        if path.suffix == ".parquet":
            pq.write_table(table, aside, compression="zstd")
        else:
            rows = [row | {"parts": dict(row["parts"] or [])} for row in table.to_pylist()]
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
            aside.write_text("".join(lines), encoding="utf-8")
    return len(table)


def _joined(recorded: Recorded) -> pa.Table:
    """Return the rollouts with columns for the moment, the task, the prompt and the reference."""
    rollouts = recorded.rollouts
    rows = {g["group"]: g for g in recorded.groups.to_pylist()}
    for name in ("reference", "prompt", "task"):
        column = pa.array([rows[g][name] for g in rollouts["group"].to_pylist()], pa.string())
        rollouts = rollouts.add_column(2, name, column)
    count = len(rollouts)
    rollouts = rollouts.add_column(0, "number", pa.array([recorded.moment.number] * count, pa.int32()))
    return rollouts.add_column(0, "kind", pa.array([recorded.moment.kind] * count, pa.string()))


def print_prompts(recorded: Recorded, unfiltered: Recorded, limit: int) -> None:
    """Print the prompts, hardest first. limit: maximum number of prompts, 0 for all."""
    groups = sorted(recorded.groups.to_pylist(), key=lambda g: (g["right"] / (g["rollouts"] or 1), g["group"]))
    shown = groups[:limit] if limit else groups
    is_step = recorded.moment.kind == "step"
    rows = [
        (
            f"{g['right']}/{g['rollouts']}",
            str(g["distinct"]),
            "" if g["tokens"] is None else f"{g['tokens']:.0f}",
            *(["yes" if g["trained"] else "no"] if is_step else []),
            one_line(g["prompt_id"]),
            one_line(g["prompt"], _MAX_CHARS) if g["prompt"] is not None else "(not recorded)",
        )
        for g in shown
    ]
    if rows:
        _print_table(("right", "answers", "tokens", *(["trained"] if is_step else []), "id", "prompt"), rows)
    if len(shown) < len(groups):
        print(f"{len(groups) - len(shown)} more: --limit 0 shows all")
    sampled, right = (sum(g[key] for g in groups) for key in ("rollouts", "right"))
    share = f", {100 * right / sampled:.1f}% of their {sampled} rollouts right" if sampled else ""
    total = f"{recorded.moment}: {len(groups)} of {len(unfiltered.groups)} prompts{share}"
    print(f"{total}; {len(recorded.rollouts)} recorded rollouts")


def print_prompt(moment: object, group: Row, rollouts: list[Row]) -> None:
    """Print a group: its prompt, its distinct answers with counts, and a right and a wrong response."""
    count = f"right {group['right']} of {group['rollouts']}, {group['distinct']} distinct answers"
    print(f"{moment}, prompt {one_line(group['prompt_id'])} ({group['task']}): {count}")
    print(f"\n{printable(group['prompt'] or '(not recorded)')}\n")
    if group["reference"] is not None:
        print(f"reference answer: {one_line(group['reference'])}\n")
    if not rollouts:
        print("none of its rollouts is recorded and passes the filters")
        return
    if len(rollouts) < group["rollouts"]:
        print(f"{len(rollouts)} of its {group['rollouts']} rollouts are recorded and pass the filters:")

    counts = Counter(r["answer"] for r in rollouts)
    right = Counter(r["answer"] for r in rollouts if r["right"])
    rows = []
    for answer, number in counts.most_common(_MAX_ANSWERS):
        # A verifier may score more than the answer, so equal answers can be right and wrong.
        mixed = 0 < right[answer] < number
        score = f"{right[answer]} right" if mixed else "right" if right[answer] else "wrong"
        rows.append((str(number), score, "(no answer)" if answer is None else one_line(answer, _MAX_CHARS)))
    _print_table(("rollouts", "score", "answer"), rows)
    if len(counts) > _MAX_ANSWERS:
        rest = len(rollouts) - sum(int(row[0]) for row in rows)
        print(f"{len(counts) - _MAX_ANSWERS} more answers in {rest} rollouts")

    for is_right in (True, False):
        first = next((r for r in rollouts if r["right"] is is_right), None)
        if first:
            print(f"\n--- {_title(first)}\n{_response(first)}")


def _response(r: Row) -> str:
    """Return the text of a response, with a line before each turn, each observation, and each sequence of an agent."""
    if r["turns"] is None:
        return printable(r["text"])
    names = {True: "model", False: "environment"}
    lines = []
    sequence = 0
    for turn in r["turns"]:
        if turn["sequence"] != sequence:
            sequence = turn["sequence"]
            lines.append(f"[sequence {sequence + 1}]")
        lines.append(f"[{names[turn['sampled']]}]\n{printable(turn['text'])}")
    return "\n".join(lines)


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _title(r: Row) -> str:
    word = "right" if r["right"] else "wrong"
    parts = [f"{word} (reward {r['reward']:.3g})", f"sibling {r['sibling']}", f"{r['tokens']} tokens"]
    if r["turns"] is not None:
        parts.append(f"{sum(turn['sampled'] for turn in r['turns'])} turns")
    parts.append("cut off" if r["finish"] == "length" else "ended by itself")
    if r["advantage"] is not None:
        parts.append(f"advantage {r['advantage']:+.2f}")
    if r["reason"] not in (None, "", word, "cut off"):
        parts.append(one_line(r["reason"]))
    return ", ".join([*parts, *(f"{one_line(name)} {value:.3g}" for name, value in r["parts"] or [])])
