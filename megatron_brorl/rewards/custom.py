"""Reward functions of the user. Their parameters are the text of the response and the data row.

A function that a configuration names, "my_rewards.py:score" (a file) or "package.module:score" (an importable module),
is imported in worker processes only. A function that a Python program passes is called by one thread of this process:
a notebook's function is in no file, and a fork of a process with torch's threads may hang. There it has no limit of
time or memory.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import marshal
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from megatron_brorl.errors import UserError
from megatron_brorl.rewards.extract import full
from megatron_brorl.rewards.verifier import Entry, VerifierRow
from megatron_brorl.rewards.worker_process import WorkerLostError, call_in_worker

IN_PROCESS = "this_process:reward"  # the verifier of rows that a program's own function judges
OwnReward = Callable[[str, VerifierRow], Any]  # returns anything that rewards.judge accepts

_NAME = re.compile(r"(?P<module>.+\.py|[A-Za-z_][\w.]*):(?P<function>[A-Za-z_]\w*)")
_TRL_PARAMETERS = {"prompts", "completions", "completion_ids"}


class Source(NamedTuple):
    """What a run has to know about a reward function before it starts."""

    sha256: str  # of its file
    pure: bool  # whether it has a true attribute `pure`: equal answers to a row have equal scores


def is_custom(name: str) -> bool:
    """Return whether the name of a verifier is a module and a function.

    Modules of Python's own library are excluded: a downloaded data file could name builtins:exec.
    """
    match = _NAME.fullmatch(name)
    return match is not None and match["module"].split(".")[0] not in sys.stdlib_module_names


def entry(name: str) -> Entry:
    """Return the entry of a function, without importing it."""
    return Entry(
        about="your own function",
        load=lambda: _import(name)[0],
        find=full,
        check_row=lambda row, where: None,
        max_chars=1 << 20,  # reward.max_chars is the limit
        foreign=True,
    )


def look_at(name: str) -> Source:
    """Import the function in a worker process and check it there. Raises UserError if it cannot be used."""
    try:
        error, *source = call_in_worker("megatron_brorl.rewards.custom:inspected", name)
    except WorkerLostError as lost:
        raise UserError(f"verifier {name}: {lost}") from None
    if error:
        raise UserError(error)
    return Source(*source)


def inspected(name: str) -> tuple[str, str, bool]:
    """Import a function in this process. Return an error message, the hash of its file, and whether it is pure."""
    try:
        function, module = _import(name)
        check_parameters(function, f"verifier {name}")
        file = Path(module.__file__ or "")
        if not file.is_file():
            raise UserError(f"verifier {name}: its module has no file to compute a hash of; put it into a .py file")
    except UserError as e:
        return str(e), "", False
    return "", hashlib.sha256(file.read_bytes()).hexdigest(), getattr(function, "pure", False) is True


def check_parameters(function: Callable[..., Any], what: str) -> None:
    """Raise UserError, naming `what`, unless the function can be called with a response and a row.

    Many reward functions of TRL could also be called with two arguments, and would judge nonsense.
    """
    try:
        signature = inspect.signature(function)
        if not signature.parameters.keys().isdisjoint(_TRL_PARAMETERS):
            raise UserError(
                f"{what}: takes {signature} as a reward function of TRL does; here it judges one response: write "
                'def score(response, row), with row["prompt"], row["answer"], and other columns in row["metadata"]'
            )
        signature.bind("response", {})
    except (TypeError, ValueError) as e:
        raise UserError(f"{what}: must take (response, row): {e}") from None


def sha256(function: OwnReward) -> str:
    """Return the hash of a function's source, else of its compiled code, else of its name."""
    try:
        text = textwrap.dedent(inspect.getsource(function)).encode()
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        name = f"{type(function).__module__}.{type(function).__qualname__}.{getattr(function, '__name__', '')}"
        text = marshal.dumps(code) if code else name.encode()
    return hashlib.sha256(text).hexdigest()


def _import(name: str) -> tuple[Callable[..., Any], ModuleType]:
    match = _NAME.fullmatch(name)
    assert match is not None
    path, function = match["module"], match["function"]
    try:
        module = _module_of(Path(path)) if path.endswith(".py") else importlib.import_module(path)
    except FileNotFoundError:
        folder = Path(path).absolute().parent
        raise UserError(f"verifier {name}: no such file in {folder}; paths start at the working directory") from None
    except BaseException as e:  # A user's module may raise anything.
        reason = " ".join(str(e).split())
        raise UserError(f"verifier {name}: cannot be imported: {type(e).__name__}: {reason}{_line_of(e)}") from None

    found = getattr(module, function, None)
    if not callable(found):
        raise UserError(f"verifier {name}: {path} has no function {function!r}; define it, or name another")
    return found, module


def _module_of(path: Path) -> ModuleType:
    """Import a file, which may import its neighbours."""
    path = path.absolute()
    key = f"own_verifier_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    if key in sys.modules:
        return sys.modules[key]
    source = path.read_bytes()
    module = ModuleType(key)
    module.__file__ = str(path)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    exec(compile(source, str(path), "exec"), module.__dict__)
    sys.modules[key] = module
    return module


def _line_of(error: BaseException) -> str:
    """Return the file and line that raised an exception; the message of a SyntaxError already has them."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or isinstance(error, SyntaxError):
        return ""
    return f" ({Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno})"
