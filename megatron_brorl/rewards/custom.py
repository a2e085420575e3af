"""Reward functions that users write. Their parameters are the text of the response and the data row.

A function that a configuration names, "my_rewards.py:score" (a file) or "package.module:score" (an importable module),
is imported in worker processes only. A function that a Python program passes is called in this process, without limits
of time or memory. A worker process cannot import it if it comes from a notebook, and a fork of a process with torch's
threads may hang.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import marshal
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_brorl.errors import UserError
from megatron_brorl.rewards.extract import full
from megatron_brorl.rewards.verifier import Entry, VerifierRow
from megatron_brorl.rewards.worker_process import WorkerLostError, call_in_worker

IN_PROCESS = "this_process:reward"  # the verifier of rows that a program's own function scores
RewardFunction = Callable[[str, VerifierRow], Any]  # returns anything that rewards.verifier accepts

_NAME = re.compile(r"(?P<module>.+\.py|[A-Za-z_][\w.]*):(?P<function>[A-Za-z_]\w*)")
_TRL_PARAMETERS = {"prompts", "completions", "completion_ids"}


def is_custom(name: str) -> bool:
    """Return whether a verifier's name has the form "module:function".

    Modules of the standard library are excluded, because a downloaded data file could name builtins:exec.
    """
    match = _NAME.fullmatch(name)
    return match is not None and match["module"].split(".")[0] not in sys.stdlib_module_names


def entry(name: str) -> Entry:
    """Return the entry of a function, without importing it."""
    # The limit on characters is reward.max_chars.
    return Entry(lambda: _import(name)[0], full, lambda row, where: None, max_chars=1 << 20, is_custom=True)


def validate(name: str) -> tuple[str, bool]:
    """Check a function in a worker process. Return the hash of its file, and its attribute `pure` (False by default).

    A pure function gives equal scores to equal answers to a row. Raises UserError if the function cannot be used.
    """
    try:
        error, sha256, pure = call_in_worker("megatron_brorl.rewards.custom:validate_here", name)
    except WorkerLostError as lost:
        raise UserError(f"verifier {name}: {lost}") from None
    if error:
        raise UserError(error)
    return sha256, pure


def validate_here(name: str) -> tuple[str, str, bool]:
    """Check a function in this process. Return an error message, or "" and the values of `validate`."""
    try:
        function, module = _import(name)
        check_parameters(function, f"verifier {name}")
        file = Path(module.__file__ or "")
        if not file.is_file():
            raise UserError(f"verifier {name}: its module has no file to compute a hash of; put it into a .py file")
    except UserError as e:
        return str(e), "", False
    return "", hashlib.sha256(file.read_bytes()).hexdigest(), getattr(function, "pure", False) is True


def check_parameters(function: Callable[..., Any], label: str) -> None:
    """Raise UserError, which begins with `label`, unless the function can be called with a response and a row.

    Functions written for TRL are refused, because they may also accept two arguments but expect other values.
    """
    try:
        signature = inspect.signature(function)
        if not signature.parameters.keys().isdisjoint(_TRL_PARAMETERS):
            raise UserError(
                f"{label}: takes {signature} as a reward function of TRL does; here it judges one response: write "
                'def score(response, row), with row["prompt"], row["answer"], and other columns in row["metadata"]'
            )
        signature.bind("response", {})
    except (TypeError, ValueError) as e:
        raise UserError(f"{label}: must take (response, row): {e}") from None


def sha256(function: RewardFunction) -> str:
    """Return the hash of a function's source, or of its bytecode or name if the source is not available."""
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        name = getattr(function, "__qualname__", type(function).__qualname__)
        text = marshal.dumps(code).hex() if code else name
    return hashlib.sha256(text.encode()).hexdigest()


def _import(name: str) -> tuple[Callable[..., Any], ModuleType]:
    path, _, function = name.rpartition(":")
    file = Path(path).absolute()
    if path.endswith(".py") and not file.is_file():
        where = f"no such file in {file.parent}; paths start at the working directory"
        raise UserError(f"verifier {name}: {where}")
    try:
        module = _import_file(file) if path.endswith(".py") else importlib.import_module(path)
    except BaseException as e:  # A user's module may raise anything.
        last = traceback.extract_tb(e.__traceback__)[-1]
        line = "" if isinstance(e, SyntaxError) else f" ({Path(last.filename).name}, line {last.lineno})"
        reason = f"{type(e).__name__}: {' '.join(str(e).split())}{line}"
        raise UserError(f"verifier {name}: cannot be imported: {reason}") from None

    found = getattr(module, function, None)
    if not callable(found):
        raise UserError(f"verifier {name}: {path} has no function {function!r}; define it, or name another")
    return found, module


def _import_file(path: Path) -> ModuleType:
    """Import a file, which may import other files of its folder."""
    key = f"custom_reward_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    if key not in sys.modules:
        module = ModuleType(key)
        module.__file__ = str(path)
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
        sys.modules[key] = module
    return sys.modules[key]
