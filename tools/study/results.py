"""The table of results: a row per run, evaluation and prompt set, in a Parquet file per run that is whole or absent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_brorl.errors import UserError

RUNS, TABLE = "runs", "results.parquet"

SCHEMA = pa.schema(
    [
        ("design_sha256", pa.string()),
        ("config_sha256", pa.string()),  # of the run's whole configuration, as it was built
        ("run", pa.string()),
        ("phase", pa.string()),  # tune, test, plateau, pilot
        ("arm", pa.string()),
        ("bin", pa.string()),  # difficulty of the prompts that it trains on
        ("warm_start", pa.int64()),  # its seed
        ("part", pa.int32()),  # of the way to a plateau: the number of the continuation; else 0
        ("lr", pa.float64()),
        ("n", pa.int32()),
        ("prompts_per_step", pa.int32()),
        ("error", pa.string()),  # what ended the run before its budget; empty where nothing did
        ("point", pa.int32()),  # 0 = the start, which runs of a warm start and bin have in common
        ("steps", pa.int64()),  # of this run up to here, as all of the following
        ("updates", pa.int64()),  # optimizer steps
        ("seconds", pa.float64()),  # of steps, on the slowest rank; evaluations are not in it
        ("cpu_seconds", pa.float64()),  # of all ranks in steps, without scoring processes
        ("rollouts", pa.float64()),
        ("tokens", pa.float64()),  # sampled, and each group's prompt once
        ("kept_share", pa.float64()),  # of groups since the point before; null at the start
        ("prompt_set", pa.string()),  # trained, unseen, support; advice: of a pilot, a row without a point of a curve
        ("pass_at_1", pa.float64()),
        ("k", pa.int32()),
        ("pass_at_k", pa.float64()),  # unbiased; null where a prompt has fewer samples
        ("response_tokens", pa.float64()),
        ("prompts", pa.list_(pa.string())),  # ids
        ("right", pa.list_(pa.int32())),  # of each
        ("samples", pa.list_(pa.int32())),
        ("advised_n", pa.int32()),  # by `brorl advise`, for prompts and N together; null where it knows none
        ("advised_low", pa.int32()),  # its 95% interval
        ("advised_high", pa.int32()),
        ("advised_prompts", pa.int32()),
        ("load_average", pa.float64()),  # of a minute, when the run began
        ("began", pa.float64()),  # Unix time
        ("machine", pa.string()),
        ("versions", pa.string()),  # JSON
    ]
)


def write_run(directory: Path, run: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """A run's rows, whole or not at all."""
    path = path_of(directory, run)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".writing")
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows], SCHEMA), aside)
    aside.replace(path)


def path_of(directory: Path, run: str) -> Path:
    """Where a run's rows are, once it is done."""
    return directory / RUNS / f"{run}.parquet"


def is_done(directory: Path, run: str) -> bool:
    """Whether a run's rows are there."""
    return path_of(directory, run).is_file()


def read(paths: Iterable[Path], design_sha256: str) -> list[dict[str, Any]]:
    """The rows of runs. Raises UserError naming a file that cannot be read, or is of another design."""
    rows: list[dict[str, Any]] = []
    for path in paths:
        try:
            table = pq.read_table(path, schema=SCHEMA)
        except (OSError, pa.ArrowException) as e:
            raise UserError(f"{path}: not a table of results ({' '.join(str(e).split())}); delete it") from None
        found = set(table.column("design_sha256").to_pylist())
        if found != {design_sha256}:
            raise UserError(
                f"{path}: its rows are of design {', '.join(sorted(x[:12] for x in found))}, now "
                f"{design_sha256[:12]}: give a directory of its own to the changed design, or put the old one back"
            )
        rows += table.to_pylist()
    return rows


def read_all(directory: Path, design_sha256: str) -> list[dict[str, Any]]:
    """The rows of all runs that are done; see read."""
    return read(sorted((directory / RUNS).glob("*.parquet")), design_sha256)


def join(directory: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """All rows as one file, from which the page is made."""
    path = directory / TABLE
    aside = path.with_suffix(".writing")
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows], SCHEMA), aside)
    aside.replace(path)
    return path
