"""What the pool and its workers say to one another, over two pipes.

Pool to worker: the length of a pickle (8 bytes), then the pickle, a list of items. Worker to pool: one fixed record
when it has imported what the items need, then one per item, each written before the next item begins. So the pool
knows at any moment which item a worker is at, and it never unpickles what comes back from a process that has handled
hostile text.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

Item = tuple[str, str | None, Mapping[str, Any], str]  # verifier, reference, metadata, answer

LENGTH = struct.Struct("<Q")
RECORD = struct.Struct("<Bd120s")  # status, reward, the exception's first line in UTF-8 and zeros

READY = 255
STATUSES = ("ok", "error", "invalid", "broken")  # by their code
OK, ERROR, INVALID, BROKEN = range(4)
