"""Recorded rollouts, chosen and summed up: what `brorl rollouts` shows and exports."""

from __future__ import annotations

import csv
import difflib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from megatron_brorl.errors import UserError
from megatron_brorl.record.files import Moment, moments, only, read_groups, read_rollouts

Row = Mapping[str, Any]  # of schema.GROUPS or schema.ROLLOUTS
EXPORTS = (".jsonl", ".parquet", ".csv")


@dataclass(frozen=True)
class Filters:
    """What is left in; by default everything."""

    prompt: str | None = None  # the id of one
    mixed: bool = False  # prompts with right and wrong responses alone
    right: bool = False  # right responses alone; with `wrong` too, both
    wrong: bool = False
    contains: str = ""  # in a response's text, in any case

    def of_responses(self) -> bool:
        """Whether some responses of a prompt may be left out."""
        return self.right != self.wrong or bool(self.contains)


@dataclass(frozen=True)
class Recorded:
    """What there is of one moment, or what a filter leaves of it."""

    moment: Moment
    groups: pa.Table  # schema.GROUPS
    rollouts: pa.Table  # schema.ROLLOUTS

    def filtered(self, by: Filters) -> Recorded:
        """What is left: rollouts of groups that are left, and, with filters of responses, groups that have some."""
        # Groups by what their rows say.
        groups = self.groups
        if by.prompt is not None:
            groups = only(groups, "prompt_id", [by.prompt])
        if by.mixed:
            groups = only(groups, "outcome", ["mixed"])

        # Their rollouts.
        rollouts = only(self.rollouts, "group", groups["group"].to_pylist())
        if by.right != by.wrong:
            rollouts = only(rollouts, "right", [by.right])
        if by.contains:
            rollouts = rollouts.filter(pc.match_substring(rollouts["text"], by.contains, ignore_case=True))
        if by.of_responses():
            groups = only(groups, "group", rollouts["group"].unique().to_pylist())
        return replace(self, groups=groups, rollouts=rollouts)

    def of_each_group(self) -> Iterator[tuple[Row, list[Row]]]:
        """Every group with its rollouts."""
        for group in self.groups.to_pylist():
            yield group, only(self.rollouts, "group", [group["group"]]).to_pylist()


def read(folder: Path, kind: str, number: int | None, prompt: str | None) -> Recorded:
    """What was recorded in one step or evaluation.

    number None: the last one of the kind; kind "": of evaluations, or of steps where there are none. With a prompt it
    is the last one that has recorded it. Raises UserError where there is no such thing, or a file is damaged.
    """
    there = moments(folder)
    found = [m for m in there if kind in ("", m.kind) and number in (None, m.number)]
    if not found:
        raise UserError(f"{folder}: no {kind}{'' if number is None else f' {number}'} there; there are {listed(there)}")

    # The last one first, which is an evaluation where there is any.
    if prompt is None or number is not None:
        return Recorded(found[-1], read_groups(folder, found[-1]), read_rollouts(folder, found[-1]))

    ids: dict[str, None] = {}
    for moment in reversed(found):
        groups = read_groups(folder, moment)
        own = only(groups, "prompt_id", [prompt])
        if len(own) and pc.max(own["recorded"]).as_py():
            return Recorded(moment, groups, read_rollouts(folder, moment))
        ids |= dict.fromkeys(groups.filter(pc.greater(groups["recorded"], 0))["prompt_id"].to_pylist())
    near = difflib.get_close_matches(prompt, ids, 1, 0) or ["none at all"]
    raise UserError(f"{folder}: nothing is recorded of prompt {prompt!r}; the nearest id is {near[0]}")


def listed(there: list[Moment]) -> str:
    """The numbers of what there is, in words."""
    parts = []
    for kind in ("step", "evaluation"):
        numbers = [m.number for m in there if m.kind == kind]
        if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
            parts.append(f"{kind}s {numbers[0]} to {numbers[-1]}")
        elif numbers:
            parts.append(f"{kind}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}")
    return " and ".join(parts)


def answer_counts(rollouts: list[Row]) -> list[tuple[str | None, int, int]]:
    """(answer, how many, of which right) of every distinct answer, the most frequent first; None: without an answer."""
    counts = Counter(r["answer"] for r in rollouts)
    right = Counter(r["answer"] for r in rollouts if r["right"])
    return [(answer, count, right[answer]) for answer, count in counts.most_common()]


def a_pair(rollouts: list[Row]) -> list[Row]:
    """The first right and the first wrong rollout, where there are such."""
    firsts = [next((r for r in rollouts if r["right"] is right), None) for right in (True, False)]
    return [r for r in firsts if r]


def export(recorded: Recorded, path: Path) -> int:
    """Write the rollouts, each with its prompt, by the ending of the path; returns how many. Whole or not at all.

    Raises UserError for another ending, where there is nothing to write and where the file cannot be written.
    """
    # Refused before a file is begun.
    if path.suffix not in EXPORTS:
        raise UserError(f"{path}: can be exported as {', '.join(EXPORTS)}; give the file one of these endings")
    table = _joined(recorded)
    if not len(table):
        raise UserError(f"{path}: nothing to export: no recorded rollout of {recorded.moment} passes the filters")

    # Written aside and renamed, so that a file of this name is whole.
    aside = path.with_name(f".{path.name}.writing")
    try:
        if path.suffix == ".parquet":
            pq.write_table(table, aside, compression="zstd")
        else:
            # The text forms take a row at a time.
            with open(aside, "w", encoding="utf-8", newline="") as file:
                rows = map(_plain, table.to_pylist())
                if path.suffix == ".jsonl":
                    file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                else:
                    # Lists stand in a cell as JSON.
                    writer = csv.DictWriter(file, table.column_names)
                    writer.writeheader()
                    writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
        aside.replace(path)
    except OSError as e:
        raise UserError(f"{path}: cannot be written: {e.strerror}; give a file in a writable folder") from None
    return len(table)


def _joined(recorded: Recorded) -> pa.Table:
    """schema.ROLLOUTS led by when it was, and with what the prompt was."""
    rollouts, moment = recorded.rollouts, recorded.moment
    rows = {g["group"]: g for g in recorded.groups.to_pylist()}
    for name in ("reference", "prompt", "verifier"):
        column = pa.array([rows[g][name] for g in rollouts["group"].to_pylist()], pa.string())
        rollouts = rollouts.add_column(2, name, column)
    count = len(rollouts)
    rollouts = rollouts.add_column(0, "number", pa.array([moment.number] * count, pa.int32()))
    return rollouts.add_column(0, "kind", pa.array([moment.kind] * count, pa.string()))


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"parts": dict(row["parts"] or [])}


def _cell(value: object) -> object:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else value
