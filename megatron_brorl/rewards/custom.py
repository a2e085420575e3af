"""Reward functions that users write. Their parameters are the text of the response and the data row.

A function that a configuration names, "my_rewards.py:score" (a file) or "package.module:score" (an importable module),
is imported in worker processes only. A function that a Python program passes is called in this process, without limits
of time or memory, because a worker process cannot import it from a notebook.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from megatron_brorl.errors import UserError
from megatron_brorl.rewards.verifier import VerifierRow
from megatron_brorl.rewards.worker_process import WorkerLostError, call_in_worker
from megatron_brorl.user_functions import import_function

IN_PROCESS = "this_process:reward"  # the verifier of rows that a program's own function scores
RewardFunction = Callable[[str, VerifierRow], Any]  # returns anything that rewards.verifier accepts

_TRL_PARAMETERS = {"prompts", "completions", "completion_ids"}


def validate(name: str) -> tuple[str, bool]:
    """Check a function in a worker process. Return the hash of its file, and its attribute `pure` (False by default).

    A pure function gives equal scores to equal answers to a row. Raises UserError if the function cannot be used.
    """
    try:
        error, sha256, pure = call_in_worker("megatron_brorl.rewards.custom:validate_here", name)
    except WorkerLostError as lost:
        raise UserError(f"verifier {name}: the process that imports it ended or hangs: {lost}; fix its file") from None
    if error:
        raise UserError(error)
    return sha256, pure


def validate_here(name: str) -> tuple[str, str, bool]:
    """Check a function in this process. Return an error message, or "" and the values of `validate`."""
    try:
        function, sha256 = import_function(name, "verifier")
        check_parameters(function, f"verifier {name}")
    except UserError as e:
        return str(e), "", False
    return "", sha256, getattr(function, "pure", False) is True


def check_parameters(function: Callable[..., Any], label: str) -> None:
    """Raise UserError, which begins with `label`, unless the function can be called with a response and a row.

    Functions written for TRL are refused, because they may also accept two arguments but expect other values.
    """
    try:
        signature = inspect.signature(function)
        if not signature.parameters.keys().isdisjoint(_TRL_PARAMETERS):
            raise UserError(
                f"{label}: takes {signature} as a reward function of TRL does; here it judges one response: write "
                'def score(response, row), with row["prompt"], row["answer"], and other columns in row["columns"]'
            )
        signature.bind("response", {})
    except (TypeError, ValueError) as e:
        raise UserError(f"{label}: must take (response, row): {e}") from None
