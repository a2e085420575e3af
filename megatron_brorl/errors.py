"""The one exception that ends a command with one line and exit code 2, and warnings, which do not end it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from typing import Any

_LONGEST = 1_500  # characters of a message


class UserError(Exception):
    """A mistake that the user can fix.

    The message is one line that names the problem, its place (file, key or row) and a remedy. Any other
    exception is a bug of this project and keeps its traceback.
    """

    def __init__(self, message: str) -> None:
        """Replace line breaks and control characters, which file contents and messages of libraries may have."""
        line = "".join(c if c.isprintable() else " " for c in message)
        super().__init__(line if len(line) <= _LONGEST else f"{line[:_LONGEST]}...")


class StepError(UserError):
    """A UserError that all ranks raise together during a step or an evaluation, so that they can save the state."""


def print_error(text: str) -> None:
    """Print a line to stderr, which may be a closed pipe or a file on a full disk."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Print a warning to stderr as print_error does."""
    print_error(f"warning: {text}")


def shown(value: object, most: int = 200) -> str:
    """Return the text of an exception, or another value as JSON, on one line, cut after `most` characters.

    In configuration and data files, values have the form of JSON and not of Python.
    """
    try:
        if isinstance(value, UnicodeDecodeError):
            text = f"byte 0x{value.object[value.start]:02x} is not UTF-8; save the file as UTF-8"
        elif isinstance(value, BaseException):
            text = " ".join(str(value).split())
        elif isinstance(value, float):
            text = repr(value)  # inf and nan, as in TOML
        else:
            text = json.dumps(value, ensure_ascii=False, default=_plain)
    except ValueError:  # an integer of more digits than Python prints
        text = f"a number of more than {sys.get_int_max_str_digits():,} digits"
    text = text or type(value).__name__
    return text if len(text) <= most else f"{text[:most]}..."


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else repr(value)
