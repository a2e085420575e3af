"""run.dir/rollouts/: Parquet files of what was sampled in every step and every evaluation.

    step_000012.groups.parquet             schema.GROUPS, by the main rank
    step_000012.rollouts.00003.parquet     schema.ROLLOUTS, by each rank that sampled some of them: nothing travels
    evaluation_000030.groups.parquet ...   an evaluation after 30 steps; 0 is that before the first step

Steps are counted as in metrics.jsonl, from 0. A file is there whole or not at all, and its bytes are a function of its
rows: a step that is done again writes the same file again.
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

from megatron_brorl.errors import UserError
from megatron_brorl.files import rename_aside
from megatron_brorl.rollout_log.schema import GROUPS, ROLLOUTS

FOLDER = "rollouts"
_NAME = re.compile(r"(step|evaluation)_(\d+)\.(?:groups|rollouts\.\d+)\.parquet")


class Moment(NamedTuple):
    """When something was sampled."""

    kind: Literal["step", "evaluation"]
    number: int  # of a step: as in metrics.jsonl; of an evaluation: the steps that were done before it

    def __str__(self) -> str:
        return f"{self.kind} {self.number}"

    def file(self, rest: str) -> str:
        """The name of a file of this moment."""
        return f"{self.kind}_{self.number:06d}.{rest}.parquet"


def write_groups(folder: Path, moment: Moment, groups: pa.Table) -> None:
    """Record the groups of a moment, in schema.GROUPS. Raises OSError where that cannot be done."""
    _write(folder / moment.file("groups"), groups)


def write_rollouts(folder: Path, moment: Moment, rank: int, rollouts: pa.Table) -> None:
    """Record one rank's rollouts of a moment, in schema.ROLLOUTS. Raises OSError where that cannot be done."""
    _write(folder / moment.file(f"rollouts.{rank:05d}"), rollouts)


def begin(folder: Path, resume_step: int | None) -> None:
    """Make room for what comes from resume_step on: what is there of it is deleted, and older moments stay.

    None: of a new run; an older folder is moved aside to rollouts.1, .2, ... Raises UserError where nothing can be
    written.
    """
    try:
        # What a process was writing when it was killed has no end.
        for path in folder.glob(".*.parquet.writing"):
            path.unlink()
        if resume_step is None and folder.exists():
            rename_aside(folder)
        folder.mkdir(parents=True, exist_ok=True)

        # Ranks may be fewer now, and write over less than what is there.
        for path in folder.iterdir():
            moment = _moment(path)
            if moment and resume_step is not None:
                # The evaluation after so many steps is done before they are saved.
                first = resume_step if moment.kind == "step" else resume_step + 1
                if moment.number >= first:
                    path.unlink()
    except OSError as e:
        raise UserError(f"{folder}: cannot be written: {e.strerror}; make run.dir a writable folder") from None


def moments(folder: Path) -> list[Moment]:
    """What was recorded, steps before evaluations, each in order. Raises UserError where there is nothing."""
    found = {moment for path in folder.glob("*.groups.parquet") if (moment := _moment(path))}
    if not found:
        raise UserError(f"{folder}: holds no recorded rollouts; give the run.dir of a training run")
    return sorted(found, key=lambda m: (m.kind != "step", m.number))


def read_groups(folder: Path, moment: Moment) -> pa.Table:
    """The groups of a moment, in order, in schema.GROUPS. Raises UserError where the file is damaged or not there."""
    return _read([folder / moment.file("groups")], GROUPS).sort_by("group")


def read_rollouts(folder: Path, moment: Moment) -> pa.Table:
    """The rollouts of a moment by all ranks, by group and sibling, in schema.ROLLOUTS; no rows where there are none.

    Raises UserError where a file is damaged.
    """
    paths = sorted(folder.glob(moment.file("rollouts.*")))
    return _read(paths, ROLLOUTS).sort_by([("group", "ascending"), ("sibling", "ascending")])


def prompt_order(prompt_id: str) -> bytes:
    """By which prompts are chosen where not all are shown: at random, and the same whenever they come again."""
    return hashlib.blake2b(prompt_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def only(table: pa.Table, column: str, values: Iterable[object]) -> pa.Table:
    """The rows whose column is among the values."""
    field = table.schema.field(column)
    return table.filter(pc.is_in(table[column], value_set=pa.array(list(values), field.type)))


def _moment(path: Path) -> Moment | None:
    found = _NAME.fullmatch(path.name)
    return Moment(found[1], int(found[2])) if found else None  # type: ignore[arg-type]  # one of two words


def _write(path: Path, table: pa.Table) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)  # the main rank may have made it on another machine
    aside = path.with_name(f".{path.name}.writing")
    try:
        pq.write_table(table, aside, compression="zstd")
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)  # half a file is of no use
        raise


def _read(paths: list[Path], schema: pa.Schema) -> pa.Table:
    tables = [schema.empty_table()]
    for path in paths:
        try:
            table = pq.read_table(path, partitioning=None)
        except (pa.ArrowException, OSError) as e:
            why = " ".join(str(e).split())[:200]
            raise UserError(f"{path}: not a readable Parquet file ({why}); delete it, and this step is gone") from None
        if not table.schema.equals(schema):
            raise UserError(f"{path}: has not the columns of this version's recorded rollouts (docs/rollouts.md)")
        tables.append(table)
    return pa.concat_tables(tables).combine_chunks()
