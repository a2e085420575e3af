"""From a published data set to rows of this project: converted, without duplicates, of a length, decontaminated."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_brorl.data.prepare.files import files_of, raw_rows
from megatron_brorl.data.prepare.output import RowFile
from megatron_brorl.data.prepare.overlap import Contamination, Duplicates, Hit
from megatron_brorl.data.prompts import Verifiers, check_row
from megatron_brorl.data.sets.form import DataSet, Task, Unusable
from megatron_brorl.data.sets.table import INSTRUCTIONS, SETS, without_instruction
from megatron_brorl.data.tokenizers import Tokenizer
from megatron_brorl.errors import UserError

CONTAMINATED = "in an evaluation"
_SHOWN = 160  # characters of a dropped problem


@dataclass(frozen=True)
class Job:
    """What is to be prepared."""

    name: str  # of the set
    data_set: DataSet
    inputs: Sequence[Path]
    out: Path
    verifier: str = ""  # instead of the set's own
    instruction: str | None = None  # what follows a problem; None: that of its verifier
    tokenizer: Tokenizer | None = None
    max_prompt_tokens: int = 0  # of problem and instruction; 0 = any
    evaluations: Sequence[tuple[str, Path]] = ()  # (name of the set, file) to decontaminate against
    n: int = 13  # words of an n-gram

    @property
    def dropped(self) -> Path:
        """The file that lists what was left out."""
        return self.out.with_name(f"{self.out.stem}.dropped.jsonl")

    @property
    def card(self) -> Path:
        """The data card."""
        return self.out.with_name(f"{self.out.stem}.card.md")


@dataclass
class Counts:
    """What became of the rows."""

    read: Counter[Path] = field(default_factory=Counter)  # by file
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    evaluated: Counter[Path] = field(default_factory=Counter)  # problems by evaluation file
    hits: list[tuple[str, Hit]] = field(default_factory=list)  # (row, what it shares with which evaluation row)


class _Dropped(Exception):
    """A row that is left out: the reason that is counted, what there is to know of this one, its problem."""

    def __init__(self, reason: str, detail: str = "", problem: str = "", hit: Hit | None = None) -> None:
        super().__init__(reason)
        self.reason, self.detail, self.problem, self.hit = reason, detail, problem, hit


def prepare(job: Job) -> Counts:
    """Write job.out and job.dropped; what was read, kept and dropped. Memory grows by some 200 bytes per kept row.

    Raises UserError where a file cannot be read or has another layout than its set, or where no row is left.
    """
    counts = Counts()
    evaluations = _evaluations(job, counts)
    duplicates, ids, first = Duplicates(), set[str](), ""

    # Every row goes into one file or the other.
    with RowFile(job.out) as out, RowFile(job.dropped) as dropped:
        for path, where, raw in _rows(job.inputs):
            counts.read[path] += 1
            try:
                task = _task(job.data_set, raw, where)
                row = _row(job, task, where)
                _check(job, task, row, where, duplicates, evaluations)
                _take_id(row, ids, task.problem)
            except _Dropped as e:
                counts.dropped[e.reason] += 1
                # Why and where, with the text, so that a person can judge the rule.
                first = first or f"; the first: {where}: {e.detail or e.reason}"
                line = {"where": where, "reason": e.reason, "detail": e.detail, "problem": e.problem[:_SHOWN]}
                if e.hit:
                    counts.hits.append((where, e.hit))
                    line |= {"evaluation": e.hit.where, "shared": e.hit.words}
                dropped.write({key: value for key, value in line.items() if value})
                continue
            counts.kept += 1
            out.write(row)

        # An empty file would be told only by the run that reads it.
        if not counts.kept:
            why = ", ".join(f"{reason}: {count}" for reason, count in counts.dropped.most_common()) or "no rows"
            raise UserError(f"{job.inputs[0]}: no row is left ({why}){first}; is it a file of the set {job.name!r}?")
    return counts


def _rows(inputs: Sequence[Path]) -> Iterator[tuple[Path, str, dict[str, Any]]]:
    """(file, file:row, row) of every input in turn."""
    for file in (file for path in inputs for file in files_of(path)):
        for number, raw in raw_rows(file):
            where = f"{file}:{number}"
            if not isinstance(raw, dict):
                raise UserError(f"{where}: a row must be an object with a value for each column")
            yield file, where, raw


def _evaluations(job: Job, counts: Counts) -> Contamination:
    """The problems that are not to be trained on."""
    found = Contamination(job.n)
    for name, path in job.evaluations:
        for file, where, raw in _rows([path]):
            try:
                task = SETS[name].convert(raw, where)
            except Unusable:
                continue  # what no one is asked cannot be given away
            found.add(without_instruction(task.problem), where)
            counts.evaluated[file] += 1
    return found


def _task(data_set: DataSet, raw: dict[str, Any], where: str) -> Task:
    try:
        return data_set.convert(raw, where)
    except Unusable as e:
        raise _Dropped(str(e)) from None


def _row(job: Job, task: Task, where: str) -> dict[str, Any]:
    """The row of a task as it is written."""
    verifier = job.verifier or task.verifier
    instruction = INSTRUCTIONS.get(verifier, "") if job.instruction is None else job.instruction

    # A conversation says itself what it wants, and so does a row that has its instruction already.
    prompt: Any = task.messages
    if prompt is None:
        bare = without_instruction(task.problem)
        prompt = f"{bare}\n\n{instruction}" if instruction and bare == task.problem else task.problem
    row_id = task.id or hashlib.blake2b(task.problem.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    row = {
        "id": row_id if job.name == "rows" and task.id else f"{job.name}:{row_id}",
        "prompt": prompt,
        "answer": task.answer,
        "metadata": dict(task.metadata),
    }
    return {**row, "verifier": verifier} if verifier else row


def _check(
    job: Job, task: Task, row: dict[str, Any], where: str, duplicates: Duplicates, evaluations: Contamination
) -> None:
    """Raise _Dropped where the row is none that a run could read, or none that it should."""
    # A run would stop at it.
    try:
        check_row(row, where, row["id"], Verifiers())
    except UserError as e:
        raise _Dropped("refused", str(e).removeprefix(f"{where}: "), task.problem) from None

    # Too long to leave room for a response.
    if job.tokenizer is not None and job.max_prompt_tokens:
        prompt = row["prompt"] if isinstance(row["prompt"], str) else task.problem
        tokens = len(job.tokenizer.encode(prompt))
        if tokens > job.max_prompt_tokens:
            raise _Dropped(f"longer than {job.max_prompt_tokens} tokens", f"{tokens} tokens", task.problem)

    # By the problem alone: instructions are the same in all rows.
    problem = without_instruction(task.problem)
    if hit := evaluations.find(problem):
        raise _Dropped(CONTAMINATED, "", task.problem, hit)
    if reason := duplicates.reason(problem, task.answer):
        raise _Dropped(reason, "", task.problem)


def _take_id(row: dict[str, Any], ids: set[str], problem: str) -> None:
    """Runs refuse two rows of one id."""
    if row["id"] in ids:
        raise _Dropped("id taken by an earlier row", row["id"], problem)
    ids.add(row["id"])
