"""Files that commands write: whole or not at all, with an error that names the path."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_brorl.errors import UserError


def make_folder(path: Path) -> None:
    """Make the folder with its parents, where it is not there yet. Raises UserError where it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"{path.absolute()}: cannot be made: {e.strerror}; give a writable folder with --out") from None


def write_json(path: Path, value: Any) -> None:
    """As write_text, indented. JSON has no NaN and no infinity: such a number becomes null, as in metrics.jsonl."""
    write_text(path, json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")


def aligned(rows: Sequence[Sequence[str]], right: bool = False) -> list[str]:
    """A table's lines, every column as wide as its widest cell; right: cells stand at the right of theirs."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    place = str.rjust if right else str.ljust
    return ["  ".join(place(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_text(path: Path, text: str) -> None:
    """The file is the old one or the new one at any instant. Raises UserError where it cannot be written."""
    aside = path.with_name(f".{path.name}.writing")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as e:
        raise UserError(
            f"{path.absolute()}: cannot be written: {e.strerror}; give a file in a writable folder"
        ) from None
