"""run.dir/rollouts/: Parquet files with the rollouts of every step and every evaluation (docs/rollouts.md).

    step_000012.groups.parquet             GROUPS, written by the main rank
    step_000012.rollouts.00003.parquet     ROLLOUTS, written by each rank that sampled some of them
    evaluation_000030.groups.parquet       an evaluation after 30 steps; number 0 is before the first step

Steps are counted from 0, as in metrics.jsonl. Files are written atomically. Their bytes depend only on their rows, so
a step that is repeated writes the same file again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from megatron_brorl.errors import UserError, shown
from megatron_brorl.files import rename_aside

FOLDER = "rollouts"
_NAME = re.compile(r"(step|evaluation)_(\d+)\.(?:groups|rollouts\.\d+)\.parquet")

# One row per group of a step or per prompt of an evaluation.
GROUPS = pa.schema(
    [
        ("group", pa.int32()),
        ("prompt_id", pa.string()),
        ("task", pa.string()),
        ("rollouts", pa.int32()),
        ("right", pa.int32()),
        ("distinct", pa.int32()),
        ("reward", pa.float32()),
        ("tokens", pa.float32()),
        ("outcome", pa.string()),
        ("trained", pa.bool_()),
        ("recorded", pa.int32()),
        ("prompt", pa.string()),
        ("reference", pa.string()),
        ("reward_counts", pa.list_(pa.int32())),
    ]
)

# One row per rollout whose text is stored.
ROLLOUTS = pa.schema(
    [
        ("group", pa.int32()),
        ("prompt_id", pa.string()),
        ("sibling", pa.int32()),
        ("text", pa.string()),
        ("answer", pa.string()),
        ("reward", pa.float32()),
        ("right", pa.bool_()),
        ("score", pa.float64()),
        ("parts", pa.map_(pa.string(), pa.float64())),
        ("reason", pa.string()),
        ("status", pa.string()),
        ("finish", pa.string()),
        ("tokens", pa.int32()),
        ("versions", pa.list_(pa.struct([("version", pa.int32()), ("tokens", pa.int32())]))),
        ("advantage", pa.float32()),
        ("token_ids", pa.list_(pa.int32())),
        ("sampled", pa.list_(pa.bool_())),  # null without an environment, like turns
        ("turns", pa.list_(pa.struct([("text", pa.string()), ("sampled", pa.bool_()), ("sequence", pa.int32())]))),
        ("log_probs", pa.list_(pa.float32())),
    ]
)


class LogEntry(NamedTuple):
    """A recorded step or evaluation."""

    kind: Literal["step", "evaluation"]
    number: int  # step: its number in metrics.jsonl; evaluation: the number of steps before it

    @property
    def shown(self) -> int:
        """The number that people see: steps count from 1."""
        return self.number + (self.kind == "step")

    def __str__(self) -> str:
        return f"{self.kind} {self.shown}"

    def file(self, rest: str) -> str:
        """Return the name of a file of this entry. rest: "groups" or "rollouts." and the rank."""
        return f"{self.kind}_{self.number:06d}.{rest}.parquet"


def write_groups(folder: Path, entry: LogEntry, groups: pa.Table) -> None:
    """Write the groups of an entry (schema GROUPS). Raises OSError."""
    _write(folder / entry.file("groups"), groups)


def write_rollouts(folder: Path, entry: LogEntry, rank: int, rollouts: pa.Table) -> None:
    """Write one rank's rollouts of an entry (schema ROLLOUTS). Raises OSError."""
    _write(folder / entry.file(f"rollouts.{rank:05d}"), rollouts)


def prepare_folder(folder: Path, resume_step: int | None) -> None:
    """Create the folder. A resumed run deletes the files of resume_step and later, which it will write again.

    With None, a new run starts, and an older folder is renamed to rollouts.1, rollouts.2, ... Raises UserError if the
    folder is not writable.
    """
    try:
        for path in folder.glob(".*.parquet.writing"):  # left by a process that was killed
            path.unlink()
        if resume_step is None and folder.exists():
            rename_aside(folder)
        folder.mkdir(parents=True, exist_ok=True)

        # Files of other ranks are deleted too, because the resumed run may have fewer ranks.
        for path in folder.iterdir():
            entry = _entry_of(path)
            if entry and resume_step is not None:
                # The evaluation after step N runs before the checkpoint of step N is saved, so it is kept.
                first_repeated = resume_step if entry.kind == "step" else resume_step + 1
                if entry.number >= first_repeated:
                    path.unlink()
    except OSError as e:
        raise UserError(f"{folder}: cannot be written: {e.strerror}; make run.dir a writable folder") from None


def entries(folder: Path) -> list[LogEntry]:
    """Return the recorded steps, then the recorded evaluations, each in order. Raises UserError if there are none."""
    recorded = {entry for path in folder.glob("*.groups.parquet") if (entry := _entry_of(path))}
    if not recorded:
        raise UserError(f"{folder}: holds no recorded rollouts; give the run.dir of a training run")
    return sorted(recorded, key=lambda entry: (entry.kind != "step", entry.number))


def read_groups(folder: Path, entry: LogEntry) -> pa.Table:
    """Return the groups of an entry by number. Raises UserError if the file is missing or damaged."""
    return _read([folder / entry.file("groups")], GROUPS).sort_by("group")


def read_rollouts(folder: Path, entry: LogEntry) -> pa.Table:
    """Return the stored rollouts of all ranks by group and sibling; empty if there are none.

    Raises UserError if a file is damaged.
    """
    paths = sorted(folder.glob(entry.file("rollouts.*")))
    return _read(paths, ROLLOUTS).sort_by([("group", "ascending"), ("sibling", "ascending")])


def prompt_sort_key(prompt_id: str) -> bytes:
    """Return a hash by which a subset of prompts is chosen: random, but the same in every step."""
    return hashlib.blake2b(prompt_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def filter_rows(table: pa.Table, column: str, values: Iterable[object]) -> pa.Table:
    """Return the rows whose column has one of the values."""
    field = table.schema.field(column)
    return table.filter(pc.is_in(table[column], value_set=pa.array(list(values), field.type)))


def printable(text: str) -> str:
    """Replace tabs by spaces, and other control characters, which could change the terminal, by U+FFFD.

    Line breaks stay.
    """
    return "".join(c if c.isprintable() or c == "\n" else " " if c == "\t" else "\ufffd" for c in text)


def one_line(text: str, max_chars: int = 0) -> str:
    """Return the text on one line. Longer text loses its middle; 0 = no limit."""
    line = " ".join(printable(text).split())
    if not max_chars or len(line) <= max_chars:
        return line
    # The end keeps two thirds of the text, because a response ends with its answer and a prompt with its question.
    kept_chars = max_chars - len(" ... ")
    head = kept_chars // 3
    return f"{line[:head]} ... {line[len(line) - (kept_chars - head) :]}"


def _entry_of(path: Path) -> LogEntry | None:
    match = _NAME.fullmatch(path.name)
    return LogEntry(match[1], int(match[2])) if match else None  # type: ignore[arg-type]  # one of two words


def _write(path: Path, table: pa.Table) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)  # another machine may not see the main rank's folder
    aside = path.with_name(f".{path.name}.writing")
    try:
        pq.write_table(table, aside, compression="zstd")
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def _read(paths: list[Path], schema: pa.Schema) -> pa.Table:
    tables = [schema.empty_table()]
    for path in paths:
        try:
            table = pq.read_table(path, partitioning=None)
        except (pa.ArrowException, OSError) as e:
            raise UserError(f"{path}: not a readable Parquet file ({shown(e)}); delete it and go without it") from None
        if schema is GROUPS and "reward_counts" not in table.column_names:  # written by version 0.2.0
            table = table.append_column(GROUPS.field("reward_counts"), pa.nulls(len(table), pa.list_(pa.int32())))
        if not table.schema.equals(schema):
            raise UserError(f"{path}: has other columns than this version writes (docs/rollouts.md)")
        tables.append(table)
    return pa.concat_tables(tables).combine_chunks()
