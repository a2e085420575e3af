"""A run's configuration from a TOML file and `section.key=value` overrides.

Strict: an unknown section, an unknown key or a value of the wrong type is an error that names it. What can be
checked without loading anything is checked here; what needs the model or the world size is checked where those
are known (`parallel.grid`, `models.gpt`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_brorl.config.schema import Config
from megatron_brorl.config.toml import build, override
from megatron_brorl.config.validate import validate
from megatron_brorl.errors import UserError, shown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, apply `section.key=value` overrides and check the result.

    Raises UserError naming the file and key for anything unknown, mistyped or out of range.
    """
    path = Path(path).absolute()  # messages are read in logs, away from the working directory
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such configuration file") from None
    except (ValueError, RecursionError) as e:  # of its UTF-8, its syntax, or what Python makes of it
        raise UserError(f"{path}: not valid TOML: {shown(e)}") from None
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror}") from None

    return load_table(table, str(path), overrides)


def load_table(table: dict[str, Any], where: str, overrides: Sequence[str] = ()) -> Config:
    """As load, of what TOML would have made of a file; where: what messages call it. Changes the table."""
    for item in overrides:
        override(table, item)
    config = build(Config, table, where, "")
    validate(config, where)
    return config
