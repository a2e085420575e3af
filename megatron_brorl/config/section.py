"""Frozen pydantic dataclasses for the sections of a configuration."""

from __future__ import annotations

from typing import Any, TypeVar, cast

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from typing_extensions import dataclass_transform

T = TypeVar("T")
# Values are not converted between types, and unknown keys, inf and nan are rejected.
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass_transform(frozen_default=True, field_specifiers=(Field,))
def section(cls: type[T]) -> type[T]:
    """Make a class of keys a frozen dataclass that checks its values."""
    made: Any = dataclass(frozen=True, config=_STRICT)(cls)
    return cast("type[T]", made)


def key(default: Any, description: str, **bounds: Any) -> Any:
    """Return a field with its default, its description and bounds such as ge=1."""
    return Field(default, description=description, **bounds)
