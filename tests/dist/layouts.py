"""Which pairs of layout and case are tested every time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def covering(layouts: Sequence[tuple[Any, ...]], cases: Sequence[Any], every: int = 0) -> list[Any]:
    """Return (*layout, case) for all pairs. `make test` takes one in `every` (0: as few as it can); the rest are full.

    Of what it takes, every layout and every case is a part; a fault of one family, or of one layout, is found at once.
    """
    every = every or min(len(layouts), len(cases))
    assert 0 < every <= min(len(layouts), len(cases))
    return [
        pytest.param(*layout, case, marks=() if (i - j) % every == 0 else pytest.mark.full)
        for i, layout in enumerate(layouts)
        for j, case in enumerate(cases)
    ]
