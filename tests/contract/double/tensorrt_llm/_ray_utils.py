from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def control_action_decorator(func: Callable[..., Any]) -> Callable[..., Any]:
    """Run a worker's method only while no request is in flight."""

    @functools.wraps(func)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.engine.control_action():
            return func(self, *args, **kwargs)

    return wrapper
