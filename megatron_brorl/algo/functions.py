"""The functions of users that algo.advantage, algo.policy_loss and reward.group_function name.

Every mistake of a function ends the run with one line that names its file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor

from megatron_brorl.errors import StepError
from megatron_brorl.user_functions import describe, import_function, is_function, source_sha256

IN_PROCESS = {  # values of the keys for functions that a Python program passes
    "algo.advantage": "this_process:advantage",
    "algo.policy_loss": "this_process:policy_loss",
    "reward.group_function": "this_process:group_reward",
}
PARAMETERS = {  # each is passed by name
    "algo.advantage": ("rewards", "mask", "rows"),
    "algo.policy_loss": ("log_probs", "old_log_probs", "advantages", "mask", "entropy", "sequence"),
    "reward.group_function": ("row", "responses", "answers"),
}


class AlgorithmFunction:
    """A function with the checks of its results. `label` begins its messages."""

    def __init__(self, label: str, function: Callable[..., Any], sha256: str, parameters: Sequence[str]) -> None:
        """Raise UserError unless the function can be called with the names `parameters`."""
        self.sha256 = sha256
        self._label = label
        self.function = function
        try:
            inspect.signature(function).bind(**dict.fromkeys(parameters))
        except (TypeError, ValueError) as e:
            self.refuse(f"must take ({', '.join(parameters)}): {e}")

    def __call__(self, shape: Sequence[int], entries: str, **arguments: Any) -> Tensor:
        """Call the function and return its float tensor of this shape. Raises StepError, which names the `entries`."""
        try:
            result = self.function(**arguments)
        except Exception as e:
            raise StepError(f"{self._label}: {describe(e, self.function)}") from e
        if not isinstance(result, Tensor):
            self.refuse(f"returned a {type(result).__name__}, not a tensor {list(shape)} with {entries}")
        if result.shape != tuple(shape) or not result.is_floating_point():
            self.refuse(f"returned {result.dtype} {list(result.shape)}, not floats {list(shape)} with {entries}")
        return result

    def refuse(self, problem: str) -> NoReturn:
        """Raise StepError that names the function."""
        raise StepError(f"{self._label}: {problem}")


_imported: dict[str, AlgorithmFunction] = {}  # those of this process's run, by the value of the key


def find(key: str, value: str) -> AlgorithmFunction:
    """Return the function that a key names, which is imported on first use. Raises UserError."""
    if value not in _imported:
        function, sha256 = import_function(value, f"{key} =")
        _imported[value] = AlgorithmFunction(f"{key} = {value}", function, sha256, PARAMETERS[key])
    return _imported[value]


def import_functions(values: Mapping[str, str], functions: Mapping[str, Callable[..., Any]]) -> dict[str, str]:
    """Import the users' functions of a run, also files that have changed since the last run of this process.

    values: algo.advantage and algo.policy_loss. functions: those of a Python program, by key. Returns by value
    the SHA-256 of each function's file, or of the source of a function in `functions`. Raises UserError.
    """
    _imported.clear()
    for key, function in functions.items():
        _imported[IN_PROCESS[key]] = AlgorithmFunction(key, function, source_sha256(function), PARAMETERS[key])
    return {value: find(key, value).sha256 for key, value in values.items() if is_function(value)}
