"""Callbacks of a user's program during a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import pyarrow as pa

from megatron_brorl.errors import UserError


class StopTraining(Exception):
    """Raise it in a callback to end the run after the current step. The step is saved, and the run can be resumed."""


class Callback(Protocol):
    """Methods that `train` calls on the main rank. A callback may have only some of them.

    Any exception other than StopTraining is reported as an error. It, too, ends the run after the step, which is saved.
    """

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receive the metrics of a step, without times. step: as in metrics.jsonl, from 0."""

    def on_evaluation(self, step: int, results: Mapping[str, Any], samples: pa.Table) -> None:
        """Receive an evaluation of the held-out prompts after `step` steps. results: see "before" in summary.json.

        samples: the recorded rollouts (docs/rollouts.md); empty if none are recorded.
        """

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Receive the contents of summary.json at the end of the run."""


class Callbacks:
    """Calls the callbacks of a run in order. An exception is stored, and raised after the run has been saved."""

    def __init__(self, callbacks: Sequence[Any] = ()) -> None:
        self._callbacks = callbacks
        self.stop = False  # set if a callback wants the run to end
        self._error: tuple[str, Exception] | None = None  # name of the method, and the exception

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def call(self, method: str, *arguments: Any) -> None:
        """Call a method of each callback that has it. Raises nothing: an exception sets `stop`."""
        for callback in self._callbacks:
            function = getattr(callback, method, None)
            if function is None or self._error:
                continue
            try:
                function(*arguments)
            except StopTraining:
                self.stop = True
            except Exception as e:  # A user's program may raise anything.
                self._error = (f"{type(callback).__name__}.{method}", e)
                self.stop = True

    def raise_if_failed(self, state: str) -> None:
        """Raise UserError if a callback failed. state: text on the saved state, for the message."""
        if self._error:
            where, error = self._error
            reason = " ".join(str(error).split())
            raise UserError(f"callback {where}: {type(error).__name__}: {reason}; {state}") from error
