"""A user's own verifier: "my_rewards.py:score", a file, or "package.module:score", what Python can import.

It is imported in scoring processes alone, and its parameters are the response's text and the data row.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from megatron_brorl.errors import UserError
from megatron_brorl.rewards.extract import full
from megatron_brorl.rewards.verifier import Entry, VerifierRow

_NAME = re.compile(r"(?P<place>.+\.py|[A-Za-z_][\w.]*):(?P<function>[A-Za-z_]\w*)")
_MOST_CHARS = 1 << 20  # reward.max_chars is the limit
_OF_TRL = {"prompts", "completions", "completion_ids"}  # parameters of TRL's reward functions


class Source(NamedTuple):
    """What a run must know of a user's verifier before it begins."""

    sha256: str  # of its file
    pure: bool  # it says that equal answers to a row have equal scores, by an attribute `pure` that is true


def is_own(name: str) -> bool:
    """Whether a verifier's name is a place and a function in it.

    Python's own library is no place: a data file from elsewhere could name builtins:exec for what a policy writes.
    """
    match = _NAME.fullmatch(name)
    return "://" not in name and match is not None and match["place"].split(".")[0] not in sys.stdlib_module_names


def entry(name: str, about: str) -> Entry:
    """The entry of the function of that name; nothing is imported until it is loaded."""
    return Entry(
        about=about,
        load=lambda: _function(name)[0],
        find=full,
        check_row=_any_row,
        max_chars=_MOST_CHARS,
        pure=False,  # until inspected
        foreign=True,
    )


def inspected(name: str) -> Source:
    """Import it and look. Raises UserError in one line for what cannot be imported, or called as verifiers are."""
    function, module = _function(name)
    check_parameters(function, f"verifier {name}")
    file = Path(module.__file__ or "")
    if not file.is_file():
        raise UserError(f"verifier {name}: its module has no file that a run could be held to; put it into a .py file")
    return Source(hashlib.sha256(file.read_bytes()).hexdigest(), getattr(function, "pure", False) is True)


def check_parameters(function: Callable[..., Any], what: str) -> None:
    """Raise UserError, naming `what`, unless the function can be called with a response and a row.

    Reward functions of TRL take whole batches as `prompts` and `completions`, and the data's columns by name. Many of
    them could be called with two arguments, and would judge nonsense.
    """
    try:
        signature = inspect.signature(function)
        if not signature.parameters.keys().isdisjoint(_OF_TRL):
            raise UserError(
                f"{what}: takes {signature} as a reward function of TRL does; here it judges one response: write "
                'def score(response, row), with row["prompt"], row["answer"], and other columns in row["metadata"]'
            )
        signature.bind("response", {})
    except (TypeError, ValueError) as e:
        raise UserError(f"{what}: must take (response, row): {e}") from None


def _any_row(row: VerifierRow, where: str) -> None:
    """Its author knows what a row must have."""


def _function(name: str) -> tuple[Callable[..., Any], ModuleType]:
    match = _NAME.fullmatch(name)
    assert match is not None
    place, function = match["place"], match["function"]

    # Whatever goes wrong in a user's module is told in a line, with its place where Python knows it.
    try:
        module = _module_of(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except FileNotFoundError:
        where = Path(place).absolute().parent
        raise UserError(f"verifier {name}: no such file in {where}; paths start at the working directory") from None
    except BaseException as e:
        reason = " ".join(str(e).split())
        raise UserError(f"verifier {name}: cannot be imported: {type(e).__name__}: {reason}{_line_of(e)}") from None

    found = getattr(module, function, None)
    if not callable(found):
        raise UserError(f"verifier {name}: {place} has no function {function!r}; define it, or name another")
    return found, module


def _module_of(path: Path) -> ModuleType:
    """The module of a file, which may import its neighbours."""
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
    """Where it was raised; a SyntaxError says so itself."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or isinstance(error, SyntaxError):
        return ""
    return f" ({Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno})"
