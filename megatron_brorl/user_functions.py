"""Functions that users write. A configuration names them "my_file.py:function" or "package.module:function"."""

from __future__ import annotations

import contextlib
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

_NAME = re.compile(r"(?P<module>.+\.py|[A-Za-z_][\w.]*):(?P<function>[A-Za-z_]\w*)")


def is_function(name: str) -> bool:
    """Return whether a name has the form "module:function".

    Modules of the standard library are excluded, because a downloaded data file could name builtins:exec.
    """
    match = _NAME.fullmatch(name)
    return match is not None and match["module"].split(".")[0] not in sys.stdlib_module_names


def import_function(name: str, what: str) -> tuple[Callable[..., Any], str]:
    """Import a function. Return it and the SHA-256 of the file of its module.

    what: words before the name in messages. Raises UserError if the import fails, or function or file is missing.
    """
    path, _, function = name.rpartition(":")
    file = Path(path).absolute()
    if path.endswith(".py") and not file.is_file():
        raise UserError(f"{what} {name}: no such file in {file.parent}; paths start at the working directory")
    try:
        module = _import_file(file) if path.endswith(".py") else importlib.import_module(path)
    except BaseException as e:  # A user's module may raise anything.
        # The missing module is `path` or a package that contains it, and not a module that the file imports.
        if isinstance(e, ModuleNotFoundError) and e.name and f"{path}.".startswith(f"{e.name}."):
            reason = f"no module {e.name} on the Python path; name its file instead, as FOLDER/FILE.py:{function}"
            raise UserError(f"{what} {name}: {reason}") from None
        raise UserError(f"{what} {name}: cannot be imported: {describe(e)}") from None

    imported = getattr(module, function, None)
    if not callable(imported):
        raise UserError(f"{what} {name}: {path} does not define {function!r}; add it, or name another")
    source = Path(module.__file__ or "")
    if not source.is_file():
        raise UserError(f"{what} {name}: its module has no file to compute a hash of; put it into a .py file")
    return imported, hashlib.sha256(source.read_bytes()).hexdigest()


def source_sha256(function: Callable[..., Any]) -> str:
    """Return the hash of a function's source, or of its bytecode or name if the source is not available."""
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        name = getattr(function, "__qualname__", type(function).__qualname__)
        text = marshal.dumps(code).hex() if code else name
    return hashlib.sha256(text.encode()).hexdigest()


def describe(error: BaseException, function: Callable[..., Any] | None = None) -> str:
    """Return type, message and place of an exception in one line. The place is the last line in the function's file."""
    text = ""
    with contextlib.suppress(BaseException):  # str() of a user's exception class may raise
        text = " ".join(str(error).split())
    file = getattr(getattr(function, "__code__", None), "co_filename", None)
    frames = [] if isinstance(error, SyntaxError) else traceback.extract_tb(error.__traceback__)
    places = [f" ({Path(x.filename).name}, line {x.lineno})" for x in frames if file in (None, x.filename)]
    return f"{type(error).__name__}{': ' if text else ''}{text}{''.join(places[-1:])}"


def _import_file(path: Path) -> ModuleType:
    """Import a file, which may import other files of its folder. A changed file is imported again."""
    source = path.read_bytes()
    key = f"user_file_{hashlib.sha256(str(path).encode() + source).hexdigest()[:16]}"
    if key not in sys.modules:
        module = ModuleType(key)
        module.__file__ = str(path)
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        exec(compile(source, str(path), "exec"), module.__dict__)
        sys.modules[key] = module
    return sys.modules[key]
