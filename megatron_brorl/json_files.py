"""JSON that others may have written: an object, or one line that says what is wrong with the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_brorl.errors import UserError, shown


def read_object(path: Path, remedy: str = "copy it again") -> dict[str, Any]:
    """The object that a file holds. Raises UserError where it holds none, which ends with the remedy.

    Raises OSError where a disk fails, or permissions do: nothing is known of the file then, and each rank speaks for
    itself.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as e:
        raise UserError(f"{path}: cannot be read: {e.strerror}; {remedy}") from None
    except (ValueError, RecursionError) as e:  # of its UTF-8, its syntax, or what Python makes of it
        raise UserError(f"{path}: not valid JSON: {shown(e)}; {remedy}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: must hold a JSON object; {remedy}")
    return found
