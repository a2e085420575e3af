"""Files that commands write: whole or not at all, with an error that names the path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_brorl.errors import UserError


def make_folder(path: Path) -> None:
    """Make the folder with its parents, where it is not there yet. Raises UserError where it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"{path}: cannot be made: {e.strerror}; give a writable folder with --out") from None


def write_json(path: Path, value: Any) -> None:
    """As write_text, indented."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """The file is the old one or the new one at any instant. Raises UserError where it cannot be written."""
    aside = path.with_name(f".{path.name}.writing")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as e:
        raise UserError(f"{path}: cannot be written: {e.strerror}; give a file in a writable folder") from None
