"""Rows of files in the forms in which data sets are published, one at a time: a file need not fit in memory."""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from megatron_brorl.data.nulls import from_arrow
from megatron_brorl.errors import UserError

_SEPARATOR = re.compile(r"\s*,?\s*")
_BATCH = 256  # rows of a Parquet file in memory; some have megabytes of tests
_CHUNK = 1 << 20  # characters of a JSON list, bytes of a file that is hashed


def files_of(path: Path) -> list[Path]:
    """The files with rows behind an input: itself, or those of a folder that datasets' save_to_disk wrote.

    Raises UserError where there is none.
    """
    if path.is_file():
        return [path]
    if not path.exists():
        raise UserError(f"{path}: no such data file")

    # Several splits in one folder, or one.
    if (path / "dataset_dict.json").is_file():
        splits = sorted(p.parent.name for p in path.glob("*/state.json"))
        raise UserError(f"{path}: has the splits {', '.join(splits)}; give the folder of one, such as {path}/train")
    state = path / "state.json"
    if not state.is_file():
        raise UserError(f"{path}: a folder without state.json was not written by save_to_disk; give single files")
    try:
        return [path / part["filename"] for part in json.loads(state.read_text(encoding="utf-8"))["_data_files"]]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{state}: does not list its _data_files; save the data set again") from None


def raw_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """(number from 1, row) of a file; lines count as numbers where a row is a line.

    Raises UserError where the file cannot be read or is of another kind, or naming the row that is malformed.
    """
    readers = {".jsonl": _lines, ".json": _json, ".parquet": parquet_rows, ".arrow": _arrow, ".csv": _csv}
    if path.suffix not in readers:
        raise UserError(f"{path}: unknown kind of data file; known: {', '.join(readers)}")
    try:
        yield from readers[path.suffix](path)
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror or e}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8; save the file as UTF-8") from None
    except (pyarrow.ArrowException, csv.Error) as e:
        raise UserError(f"{path}: not a valid {path.suffix} file: {' '.join(str(e).split())}") from None


def sha256(path: Path) -> str:
    """Of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(_CHUNK):
            digest.update(part)
    return digest.hexdigest()


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _parsed(line, path, number)


def _json(path: Path) -> Iterator[tuple[int, Any]]:
    """A list of objects, read in chunks; or lines of JSON under another name."""
    with path.open(encoding="utf-8-sig") as file:
        text = file.read(_CHUNK).lstrip()
        if not text.startswith("["):
            yield from _lines(path)
            return

        # An element is parsed as soon as all of it is there.
        decoder, number, at = json.JSONDecoder(), 1, 1
        while True:
            begin = _between(text, at)
            if text.startswith("]", begin):
                return
            try:
                row, at = decoder.raw_decode(text, begin)
            except (ValueError, RecursionError) as e:
                more = file.read(max(_CHUNK, len(text) - at))  # doubling: a huge row is not parsed over and over
                if not more:
                    reason = " ".join(str(e).split())
                    raise UserError(f"{path}:{number}: not valid JSON: {reason}; mend the file") from None
                text, at = text[at:] + more, 0
                continue
            yield number, row
            number += 1


def _between(text: str, at: int) -> int:
    """Where the next element of a list begins, or its end."""
    found = _SEPARATOR.match(text, at)
    return found.end() if found else at


def parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number from 1, row) of a Parquet file; see _arrow_rows. Raises OSError and pyarrow.ArrowException."""
    with pyarrow.parquet.ParquetFile(path) as file:
        yield from enumerate(_arrow_rows(file.iter_batches(batch_size=_BATCH)), start=1)


def _arrow(path: Path) -> Iterator[tuple[int, Any]]:
    """The stream that datasets writes."""
    with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as reader:
        yield from enumerate(_arrow_rows(reader), start=1)


def _arrow_rows(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[dict[str, Any]]:
    """Rows with a key for every column, null where a row has none; the values of columns are as in JSON."""
    for batch in batches:
        for row in batch.to_pylist(maps_as_pydicts="lossy"):  # the last of equal keys counts, as in JSON
            yield {name: from_arrow(value) for name, value in row.items()}


def _csv(path: Path) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(1 << 30)  # the default is short for texts
    with path.open(encoding="utf-8-sig", newline="") as file:
        yield from enumerate(csv.DictReader(file), start=1)


def _parsed(line: str, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path}:{number}: not valid JSON: {' '.join(str(e).split())}; mend the row") from None
