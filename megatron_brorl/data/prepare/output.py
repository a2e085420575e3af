"""Files of rows that are there whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import pyarrow
import pyarrow.parquet

from megatron_brorl.errors import UserError

_TEXT = pyarrow.string()
# Metadata has as many forms as there are verifiers: a string of JSON.
_SCHEMA = pyarrow.schema([(key, _TEXT) for key in ("id", "prompt", "answer", "verifier", "metadata")])
_BATCH = 1000


class RowFile:
    """A .jsonl or .parquet file under another name until it is complete; with an error in its `with` it never is."""

    def __init__(self, path: Path) -> None:
        """Raises UserError where nothing can be written there, or the ending is another."""
        if path.suffix not in (".jsonl", ".parquet"):
            raise UserError(f"{path}: unknown kind of data file; use .jsonl or .parquet")
        self._path, self._aside = path, path.with_name(f".{path.name}.writing")
        self._batch: list[Mapping[str, Any]] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = self._aside.open("wb")
        except OSError as e:
            raise UserError(f"{path}: cannot be written: {e.strerror}; give a file in a writable folder") from None
        self._parquet = pyarrow.parquet.ParquetWriter(self._file, _SCHEMA) if path.suffix == ".parquet" else None

    def write(self, row: Mapping[str, Any]) -> None:
        """One more row."""
        if self._parquet is None:
            self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            return
        if not isinstance(row["prompt"], str):
            raise UserError(f"{self._path}: conversations as prompts need a .jsonl file")
        self._batch.append({**row, "metadata": json.dumps(row["metadata"], ensure_ascii=False)})
        if len(self._batch) == _BATCH:
            self._flush()

    def _flush(self) -> None:
        if self._parquet is not None and self._batch:
            self._parquet.write_table(pyarrow.Table.from_pylist(self._batch, _SCHEMA))
            self._batch.clear()

    def __enter__(self) -> RowFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self._flush()
        if self._parquet is not None:
            self._parquet.close()
        self._file.close()
        if kind is None:
            self._aside.replace(self._path)
        else:
            self._aside.unlink(missing_ok=True)
