"""Results of an op for several numbers of threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def with_threads(call: Callable[[], Any], counts: tuple[int, ...] = (1, 2, 3)) -> list[Any]:
    """Return the results of `call` with each number of threads."""
    before = torch.get_num_threads()
    results = []
    try:
        for count in counts:
            torch.set_num_threads(count)
            results.append(call())
    finally:
        torch.set_num_threads(before)
    return results
