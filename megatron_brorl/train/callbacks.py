"""What a program of the user's is told of a run while it trains, and how it stops it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import pyarrow as pa

from megatron_brorl.errors import UserError


class StopTraining(Exception):
    """Raised by a callback: the step under way is done and saved, and the run can be gone on with."""


class Callback(Protocol):
    """What `train` calls, on the main rank. A callback may have some of these methods alone.

    Raising StopTraining ends the run after the step, saved. Any other exception does so too, and then is an error.
    """

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is done. step: as in metrics.jsonl, from 0. metrics: its figures, without times."""

    def on_evaluation(self, step: int, results: Mapping[str, Any], samples: pa.Table) -> None:
        """The held-out prompts were evaluated after `step` steps. results: as summary.json has them under "before".

        samples: the recorded rollouts (docs/rollouts.md); no rows where none are recorded.
        """

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """The run has reached its end; summary.json's contents."""


class Callbacks:
    """Those of a run, asked in order; what they raise is kept until the run can be saved."""

    def __init__(self, callbacks: Sequence[Any] = ()) -> None:
        self._callbacks = callbacks
        self.stop = False  # one has asked for the run's end
        self._error: tuple[str, Exception] | None = None  # where, and what was raised

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method of each that has it. Nothing is raised; see `stop` and `check`."""
        for callback in self._callbacks:
            function = getattr(callback, method, None)
            if function is None or self._error:
                continue
            try:
                function(*arguments)
            except StopTraining:
                self.stop = True
            except Exception as e:  # a program of the user's may raise anything
                self._error, self.stop = (f"{type(callback).__name__}.{method}", e), True

    def check(self, state: str) -> None:
        """Raise UserError where one has failed. state: what is saved of the run."""
        if self._error:
            where, error = self._error
            reason = " ".join(str(error).split())
            raise UserError(f"callback {where}: {type(error).__name__}: {reason}; {state}") from error
