"""Read rows of JSON, Parquet and CSV files.

A key with null counts as a missing key in every format, because Arrow gives each object of a column the keys of all
others, as null. Nulls that are values stay: `expected` in the test of a function that returns None, `answer` of a
reasoning-gym item, and, where JSON has them, nulls inside the arguments and results of a test or inside that item.
"""

from __future__ import annotations

import csv
import datetime
import decimal
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from megatron_brorl.errors import UserError, shown

_BATCH = 256  # rows of a Parquet file that are read at once; a row may have megabytes of tests
_BOM = b"\xef\xbb\xbf"


def raw_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number, from 1, and the row of a file. A row of JSON lines is its line as bytes; see parse_row.

    Raises UserError if the file cannot be read or has another format.
    """
    readers = {".jsonl": _lines, ".json": _json, ".parquet": _parquet, ".csv": _csv}
    if path.suffix not in readers:
        raise UserError(f"{path}: unknown kind of data file; use {', '.join(readers)}")
    try:
        yield from readers[path.suffix](path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such data file") from None
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror or e}") from None
    except (ValueError, RecursionError, pyarrow.ArrowException, csv.Error) as e:
        raise UserError(f"{path}: not a valid {path.suffix} file: {shown(e)}") from None


def parse_row(raw: Any, where: str) -> Any:
    """Return a row of raw_rows as a JSON value. Raises UserError naming the row if its line is not JSON."""
    if not isinstance(raw, bytes):
        return raw
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as e:
        raise UserError(f"{where}: {shown(e)}") from None
    except json.JSONDecodeError as e:  # str(e) would name line 1, because the row is parsed without the lines before
        raise UserError(f"{where}: not valid JSON: {e.msg} at column {e.pos + 1}; fix or remove the row") from None
    except (ValueError, RecursionError) as e:
        raise UserError(f"{where}: not valid JSON: {shown(e)}; fix or remove the row") from None


def without_nulls(value: Any, arrow: bool = False, parent_key: str = "") -> Any:
    """Return a copy of a JSON value in which no object has a null key. Null elements of lists stay.

    arrow: the value comes from an Arrow column. Nulls inside tests are removed too, dates become text, and decimals
    become numbers, as JSON would hold them. parent_key: the key under which the value was found.
    """
    if isinstance(value, list):
        return [without_nulls(element, arrow) for element in value]
    if not isinstance(value, dict):
        if arrow and isinstance(value, (datetime.date, datetime.time)):
            return value.isoformat()
        if arrow and isinstance(value, decimal.Decimal):
            return int(value) if value == value.to_integral_value() else float(value)
        return value

    # Values that a tested function or the scorer of a reasoning-gym task receives unchanged.
    unchanged: tuple[str, ...] = ("entry",) if "source_dataset" in value else ()
    nullable = "answer" if parent_key == "entry" else None
    if isinstance(value.get("args"), list):  # the test of a function
        unchanged = ("args", "kwargs", "expected")
        nullable = "expected"
    return {
        key: child if key in unchanged and not arrow else without_nulls(child, arrow, key)
        for key, child in value.items()
        if child is not None or key == nullable
    }


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(_BOM) if number == 1 else line
            if line.strip():
                yield number, line


def _json(path: Path) -> Iterator[tuple[int, Any]]:
    """Read a JSON list, or JSON lines in a file with this suffix."""
    with path.open("rb") as file:
        is_list = file.read(64).removeprefix(_BOM).lstrip().startswith(b"[")
    return enumerate(json.loads(path.read_bytes()), start=1) if is_list else _lines(path)


def _parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with pyarrow.parquet.ParquetFile(path) as file:
        # "lossy": the last of equal keys counts, as in JSON.
        batches = (batch.to_pylist(maps_as_pydicts="lossy") for batch in file.iter_batches(batch_size=_BATCH))
        for number, row in enumerate(itertools.chain.from_iterable(batches), start=1):
            yield number, {name: without_nulls(value, arrow=True) for name, value in row.items()}


def _csv(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    csv.field_size_limit(1 << 30)
    with path.open(encoding="utf-8-sig", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=1):
            if None in row:
                raise ValueError(f"row {number} has more values than columns; quote values that contain commas")
            yield number, row
