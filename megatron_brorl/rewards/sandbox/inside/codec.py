"""Encode Python values as lines of JSON: values that JSON lacks as {"!": type, "v": parts}.

Only builtin types are encoded and decoded. A subclass is encoded as the builtin type that it extends, so that no class
of a program leaves its process.
"""

from __future__ import annotations

import json
import math
import os
from typing import Any

_DEPTH = 100  # levels of nesting
_GROUPS = {"tuple": tuple, "set": set, "frozenset": frozenset}


class Unencodable(ValueError):
    """A value or a text that the encoding does not cover."""


def encode(value: Any, depth: int = _DEPTH) -> Any:
    """Return `value` in a form that json.dumps accepts. Raises Unencodable."""
    if depth == 0:
        raise Unencodable("nested too deeply")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        number = float(value)
        return number if math.isfinite(number) else {"!": "float", "v": repr(number)}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, complex):
        return {"!": "complex", "v": [encode(value.real), encode(value.imag)]}
    if isinstance(value, (bytes, bytearray)):
        return {"!": "bytes", "v": value.hex()}
    return _encode_parts(value, depth - 1)


def _encode_parts(value: Any, depth: int) -> Any:
    if isinstance(value, list):
        return [encode(part, depth) for part in value]
    for name, kind in _GROUPS.items():
        if isinstance(value, kind):
            return {"!": name, "v": [encode(part, depth) for part in value]}
    if not isinstance(value, dict):
        raise Unencodable(f"a value of type {type(value).__name__}")
    if all(type(key) is str for key in value) and "!" not in value:
        return {key: encode(part, depth) for key, part in value.items()}
    return {"!": "dict", "v": [[encode(key, depth), encode(part, depth)] for key, part in value.items()]}


def decode(form: Any) -> Any:
    """Return the value of a form from `parse`, of builtin types only. Executes nothing. Raises Unencodable."""
    if isinstance(form, list):
        return [decode(part) for part in form]
    if not isinstance(form, dict):
        return form
    if "!" not in form:
        return {key: decode(part) for key, part in form.items()}
    try:
        return _decode_tagged(form["!"], form["v"])
    except (KeyError, TypeError, ValueError) as e:
        raise Unencodable(f"no value has the form {str(form)[:80]}") from e


def _decode_tagged(name: Any, parts: Any) -> Any:
    if name in _GROUPS:
        return _GROUPS[name](decode(part) for part in parts)
    if name == "dict":
        return {decode(key): decode(part) for key, part in parts}
    if name == "float" and parts in ("nan", "inf", "-inf"):
        return float(parts)
    if name == "complex":
        return complex(*(decode(part) for part in parts))
    if name == "bytes":
        return bytes.fromhex(parts)
    raise ValueError(name)


def parse(text: str | bytes) -> Any:
    """Call json.loads, in which Python limits depth and digits. Raises Unencodable."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise Unencodable(f"not JSON: {type(e).__name__}") from e


class Wire:
    """Lines of JSON over two pipes."""

    def __init__(self, source: int, sink: int) -> None:
        self.source = source
        self.sink = sink
        self._buffer = b""

    def read(self) -> bytes | None:
        """Read the next line; None at the end."""
        chunks = [self._buffer]
        while b"\n" not in chunks[-1]:
            chunk = os.read(self.source, 1 << 16)
            if not chunk:
                return None
            chunks.append(chunk)
        line, _, self._buffer = b"".join(chunks).partition(b"\n")
        return line

    def write(self, message: dict[str, Any]) -> None:
        rest = memoryview(json.dumps(message).encode() + b"\n")
        while rest:
            rest = rest[os.write(self.sink, rest) :]
