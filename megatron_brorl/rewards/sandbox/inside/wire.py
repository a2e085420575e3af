"""Lines of JSON over a pair of pipes."""

from __future__ import annotations

import json
import os
from typing import Any


class Wire:
    """Read from `source`, write to `sink`."""

    def __init__(self, source: int, sink: int) -> None:
        self.source, self.sink = source, sink
        self._buffer = b""

    def read(self) -> bytes | None:
        """The next line; None at the end."""
        parts = [self._buffer]
        while b"\n" not in parts[-1]:
            part = os.read(self.source, 1 << 16)
            if not part:
                return None
            parts.append(part)
        line, _, self._buffer = b"".join(parts).partition(b"\n")
        return line

    def write(self, message: dict[str, Any]) -> None:
        """Write one line."""
        rest = memoryview(json.dumps(message).encode() + b"\n")
        while rest:
            rest = rest[os.write(self.sink, rest) :]
