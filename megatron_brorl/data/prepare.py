"""Prepare published data sets: convert, deduplicate, limit the length and decontaminate."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from megatron_brorl.data.chat import prompt_text
from megatron_brorl.data.prompts import check_row
from megatron_brorl.data.published_sets import INSTRUCTIONS, SETS, DataSet, Unusable, without_instruction
from megatron_brorl.data.readers import parse_row, raw_rows
from megatron_brorl.data.tokenizers import Tokenizer
from megatron_brorl.errors import UserError
from megatron_brorl.files import sha256, write_text, writing
from megatron_brorl.rewards.answer_text import has_letters
from megatron_brorl.rewards.extract import given_answer
from megatron_brorl.rewards.verifiers import math

_N_GRAM = 13  # words that two problems share; GPT-3 (Brown et al. 2020, appendix C) uses 13 for most sets
_SHOWN = 160  # characters of a dropped problem that are listed


@dataclass(frozen=True)
class Job:
    """The arguments of `brorl data prepare`: the data set, its files, and the settings of the conversion."""

    name: str  # name of the data set
    data_set: DataSet
    inputs: Sequence[Path]
    out: Path
    verifier: str = ""  # replaces the verifier of the data set, unless empty
    instruction: str | None = None  # text after a problem; None: the text in INSTRUCTIONS for its verifier
    tokenizer: Tokenizer | None = None
    max_prompt_tokens: int = 0  # limit for the problem with its instruction; 0: no limit
    evaluations: Sequence[tuple[str, Path]] = ()  # (name of the set, file) to decontaminate against

    @property
    def dropped(self) -> Path:
        """The file that lists the dropped rows."""
        return self.out.with_name(f"{self.out.stem}.dropped.jsonl")

    @property
    def card(self) -> Path:
        return self.out.with_name(f"{self.out.stem}.card.md")


@dataclass
class Counts:
    """Counts of rows for the data card."""

    read: Counter[Path] = field(default_factory=Counter)  # by file
    kept: int = 0
    letters: int = 0  # kept rows of the verifier math whose reference has letters that are text
    dropped: Counter[str] = field(default_factory=Counter)  # by reason


class Contamination:
    """Word n-grams of evaluation problems. A shorter problem is compared as a whole."""

    def __init__(self, n: int = _N_GRAM) -> None:
        self._n = n
        self._first_row: dict[str, str] = {}  # an n-gram or a short problem -> the first evaluation row that has it

    def add(self, text: str, where: str) -> None:
        """Add an evaluation problem."""
        for key in self._keys(text):
            self._first_row.setdefault(key, where)

    def find(self, text: str) -> str:
        """Return the first evaluation row that shares an n-gram with the text, and the n-gram; "" if there is none."""
        return next((f"{self._first_row[key]}: {key}" for key in self._keys(text) if key in self._first_row), "")

    def _keys(self, text: str) -> list[str]:
        words = re.findall(r"\w+", normalized(text))
        grams = [" ".join(words[i : i + self._n]) for i in range(len(words) - self._n + 1)]
        return grams or [f"= {normalized(text)}"]


def normalized(text: str) -> str:
    """Return a text in NFKC, case folded, with single spaces. Signs stay, because 2+3 is not 2-3."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def prepare(job: Job) -> Counts:
    """Write job.out, job.dropped and job.card.

    Raises UserError if a file cannot be read, or if no row is left.
    """
    counts = Counts()
    contamination = _contamination(job.evaluations)
    answers: dict[bytes, str] = {}  # digest of a problem -> its first answer, normalized
    ids: set[str] = set()
    first_reason = ""
    with _open(job.out) as out, _open(job.dropped) as dropped:
        for path, where, raw in _rows(job.inputs):
            counts.read[path] += 1
            problem = ""
            try:
                row = job.data_set.row(raw, where)
                problem = without_instruction(prompt_text(row["prompt"]))
                _complete(row, job, problem)
                check_row(row, where, row["id"])
                _check(row, job, problem, contamination, answers, ids)
            except (Unusable, UserError) as e:
                message = f"refused: {e}" if isinstance(e, UserError) else str(e)
                reason, _, detail = message.partition(": ")
                counts.dropped[reason] += 1
                first_reason = first_reason or f"; the first: {detail or reason}"
                line = {"where": where, "reason": reason, "detail": detail, "problem": problem[:_SHOWN]}
                dropped.write(json.dumps(line, ensure_ascii=False) + "\n")
                continue
            counts.kept += 1
            counts.letters += row.get("verifier") == "math" and has_letters(given_answer(row["answer"], math.same)[0])
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
        if not counts.kept:
            reasons = ", ".join(f"{reason}: {count}" for reason, count in counts.dropped.most_common()) or "no rows"
            hint = f"is it a file of the set {job.name!r}?" if job.data_set.hub else "check --prompt and --answer"
            hint = f"; {hint}" if counts.dropped["refused"] else ""
            raise UserError(f"{job.inputs[0]}: no row is left ({reasons}){first_reason}{hint}")
    write_text(job.card, _card(job, counts))
    return counts


def _rows(inputs: Iterable[Path]) -> Iterator[tuple[Path, str, Any]]:
    for path in inputs:
        for number, raw in raw_rows(path):
            yield path, f"{path}:{number}", parse_row(raw, f"{path}:{number}")


def _contamination(evaluations: Sequence[tuple[str, Path]]) -> Contamination:
    contamination = Contamination()
    for name, path in evaluations:
        for _, where, raw in _rows([path]):
            try:
                contamination.add(without_instruction(prompt_text(SETS[name].row(raw, where)["prompt"])), where)
            except Unusable:
                continue
    return contamination


def _complete(row: dict[str, Any], job: Job, problem: str) -> None:
    """Give a row its id, its verifier and the instruction of its verifier, in place."""
    verifier = job.verifier or row.get("verifier", "")
    if verifier:
        row["verifier"] = verifier
    if not problem.strip() or row.get("answer", "-") == "":
        raise Unusable("no problem or no answer")

    # The prompt differs from the problem in conversations and in rows with an instruction, which stay unchanged.
    instruction = INSTRUCTIONS.get(verifier, "") if job.instruction is None else job.instruction
    if instruction and row["prompt"] == problem:
        row["prompt"] = f"{problem}\n\n{instruction}"
    name = row.get("id") or hashlib.blake2b(problem.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    row["id"] = name if job.name == "rows" and "id" in row else f"{job.name}:{name}"


def _check(
    row: dict[str, Any], job: Job, problem: str, contamination: Contamination, answers: dict[bytes, str], ids: set[str]
) -> None:
    """Raise Unusable if a row is too long, in an evaluation, or a duplicate."""
    if job.tokenizer is not None and job.max_prompt_tokens:
        tokens = len(job.tokenizer.encode(prompt_text(row["prompt"])))
        if tokens > job.max_prompt_tokens:
            raise Unusable(f"longer than {job.max_prompt_tokens} tokens: {tokens}")
    if shared := contamination.find(problem):
        raise Unusable(f"in an evaluation: {shared}")

    # Only the problem counts, because the instruction is the same in all rows.
    key = hashlib.blake2b(normalized(problem).encode("utf-8", "surrogatepass"), digest_size=16).digest()
    answer = normalized(row.get("answer") or "")
    if key in answers:
        raise Unusable("duplicate" if answers[key] == answer else "duplicate with another answer")
    if row["id"] in ids:
        raise Unusable(f"id of an earlier row: {row['id']}")
    answers[key] = answer
    ids.add(row["id"])


def _card(job: Job, counts: Counts) -> str:
    """Return the data card: source, licence and numbers of rows."""
    hub = f"https://huggingface.co/datasets/{job.data_set.hub}" if job.data_set.hub else "your own"
    evaluations = ", ".join(f"{path} (sha256 {sha256(path)})" for _, path in job.evaluations)
    lines = [
        f"# {job.out.name}",
        f"Set: {job.name} ({hub}), licence: {job.data_set.licence}, sha256 {sha256(job.out)}",
        f"Use: {'evaluation, not training' if job.data_set.test else 'training'}",
        *(f"Input: {path}, {rows} rows, sha256 {sha256(path)}" for path, rows in counts.read.items()),
        *([f"Problems that share {_N_GRAM} words in a row with these are dropped: {evaluations}"] * bool(evaluations)),
        *(f"Dropped, {reason}: {count} rows" for reason, count in sorted(counts.dropped.items())),
        f"Written: {counts.kept} rows",
    ]
    return "\n\n".join(lines) + "\n"


@contextlib.contextmanager
def _open(path: Path) -> Iterator[IO[str]]:
    with writing(path) as aside, aside.open("w", encoding="utf-8") as file:
        yield file
