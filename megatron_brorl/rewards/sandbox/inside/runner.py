"""What runs a program inside the sandbox: every test in a fork of its own, with a deadline and a cap on its output.

The runner may be in the program's hands as soon as the program has been loaded into it. Nothing is lost by that: its
messages are the program's results, and what they should be is known outside alone.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any

from megatron_brorl.rewards.sandbox.inside import codec
from megatron_brorl.rewards.sandbox.inside.fork import Fork
from megatron_brorl.rewards.sandbox.inside.wire import Wire


def scripts(wire: Wire, order: dict[str, Any]) -> None:
    """Run the program as a script once per request {"stdin"}."""
    code = _compiled(wire, order)
    while code and (line := wire.read()) is not None:
        fork = Fork(order, codec.parse(line)["stdin"].encode("utf-8", "surrogatepass"))
        wire.write(fork.run(functools.partial(_as_main, code)))


def calls(wire: Wire, order: dict[str, Any]) -> None:
    """Load the program once, then call its function once per request {"args", "kwargs"}."""
    code = _compiled(wire, order)
    if not code:
        return
    module = ModuleType("solution")
    sys.modules["solution"] = module
    function: Callable[..., Any] | str
    try:
        exec(code, module.__dict__)
        function = _function(module, order["function"])
    except BaseException as e:  # SystemExit too
        function = f"{type(e).__name__} while the program was loaded"
    while (line := wire.read()) is not None:
        if isinstance(function, str):
            wire.write({"status": "error", "why": function})
        else:
            wire.write(Fork(order).run(functools.partial(_called, function, line)))


def _compiled(wire: Wire, order: dict[str, Any]) -> CodeType | None:
    try:
        return compile(order["program"], "solution.py", "exec", dont_inherit=True)
    except BaseException as e:  # SyntaxError, ValueError of null bytes, MemoryError of deep nesting
        wire.write({"status": "syntax", "why": f"{type(e).__name__}: the program does not compile"})
        return None


def _as_main(code: CodeType) -> None:
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["solution.py"]
    exec(code, module.__dict__)


def _function(module: ModuleType, name: str) -> Callable[..., Any]:
    """The function of that name; "Class.method": of an instance made without arguments."""
    found: Any = module
    for part in name.split("."):
        found = getattr(found() if isinstance(found, type) else found, part)
    if not callable(found):
        raise TypeError(f"{name} is not a function")
    return found


def _called(function: Callable[..., Any], line: bytes) -> Any:
    request = codec.decode(codec.parse(line))
    return codec.encode(function(*request["args"], **request["kwargs"]))
