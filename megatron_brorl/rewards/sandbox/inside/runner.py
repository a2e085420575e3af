"""Run a program inside the sandbox: every test in a fork of its own, with a deadline and a limit on its output.

A program that has been loaded may control the runner. It gains nothing by that, because the messages are its own
results, and the expected results exist only outside. Asserts contain expected results and run in a different sandbox.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import site
import sys
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any, NoReturn

from megatron_brorl.rewards.sandbox.inside import codec
from megatron_brorl.rewards.sandbox.inside.codec import Wire
from megatron_brorl.rewards.sandbox.inside.fork import Fork

# Exceptions of the program that are raised in a test. StopIteration is not one: it would end a loop of the test early.
_RAISED: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        *(ArithmeticError, OverflowError, ZeroDivisionError, LookupError, IndexError, KeyError),
        *(AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError),
    )
}


class ProgramError(Exception):
    """The program raised another exception, or gave no result."""


def scripts(wire: Wire, job: dict[str, Any]) -> None:
    """Run the program as a script once per request {"stdin"}."""
    code = _compiled(wire, job)
    if code:
        # Import the modules of the prelude once instead of in every fork. The forks report an exception.
        with contextlib.suppress(BaseException):
            exec(code[0], {"__name__": "prelude"})
    gc.freeze()  # The garbage collection at a script's end then skips the objects that exist now.
    while code and (line := wire.read()) is not None:
        fork = Fork(job, codec.parse(line)["stdin"].encode("utf-8", "surrogatepass"))

        # The exit code and the text are the result.
        wire.write(fork.run(functools.partial(_run_script, code)) | {"result": "null"})


def calls(wire: Wire, job: dict[str, Any]) -> None:
    """Load the program once, then call its function once per request {"args", "kwargs"}."""
    code = _compiled(wire, job)
    if not code:
        return
    module = _module("solution")
    function: Callable[..., Any] | str
    try:
        # A function of the prelude, such as math.gcd, is not the program's.
        exec(code[0], module.__dict__)
        name = job["function"].partition(".")[0]
        supplied = {name: module.__dict__.pop(name)} if name in module.__dict__ else {}
        _load(code[1], module)
        function = _function(module, job["function"])
        module.__dict__.update(supplied | module.__dict__)
    except BaseException as e:  # includes SystemExit
        function = f"{type(e).__name__} while the program was loaded"
    while (line := wire.read()) is not None:
        if isinstance(function, str):
            wire.write({"status": "error", "why": function})
            continue
        message = Fork(job).run(functools.partial(_call, function, line))
        if message["status"] == "ok" and not message["result"]:
            message = {"status": "error", "why": "the program exited before the function returned"}
        wire.write(message)


def asserts(wire: Wire, job: dict[str, Any]) -> None:
    """Run the test {"test"} of each request. Write {"call"} for each call, and {"passed", "why"} at the end.

    The tests call a substitute for the program's function. The substitute sends the arguments out as JSON and returns
    the decoded result, which has only builtin types. The program therefore cannot read or change a test.
    """
    function = _remote_function(wire)
    while (line := wire.read()) is not None:
        names: dict[str, Any] = {"__name__": "tests", job["function"]: function}
        try:
            exec(compile(job["program"], "setup.py", "exec", dont_inherit=True), names)
            exec(compile(codec.parse(line)["test"], "test.py", "exec", dont_inherit=True), names)
            if callable(names.get("check")):  # HumanEval's form
                names["check"](function)
        except BaseException as e:  # Includes SystemExit: a test that ends early has not passed.
            wire.write({"passed": False, "why": f"{type(e).__name__}: {e}".removesuffix(": ")[:200]})
        else:
            wire.write({"passed": True, "why": ""})


def _run_script(code: tuple[CodeType, CodeType]) -> NoReturn:
    """Execute `code` as __main__. SystemExit at the end makes the interpreter shut down as it does after a script."""
    module = _module("__main__")
    sys.argv = ["solution.py"]
    for part in code:
        exec(part, module.__dict__)
    sys.exit()


def _module(name: str) -> ModuleType:
    module = ModuleType(name)
    module.__file__ = os.path.abspath("solution.py")
    sys.modules[name] = module
    return module


def _load(code: CodeType, module: ModuleType) -> None:
    """Execute a program, which may exit with 0 once it has defined its function."""
    pid = os.getpid()
    try:
        exec(code, module.__dict__)
    except SystemExit as e:
        if e.code not in (None, 0):
            raise
    finally:
        if os.getpid() != pid:
            os._exit(0)  # A process that the program forked must not answer requests.


def _compiled(wire: Wire, job: dict[str, Any]) -> tuple[CodeType, CodeType] | None:
    """Return the prelude and the program."""
    site.setquit()  # Defines exit() and quit(), which the option -S leaves out.
    try:
        prelude = compile(job["prelude"], "prelude.py", "exec", dont_inherit=True)
        return prelude, compile(job["program"], "solution.py", "exec", dont_inherit=True)
    except BaseException as e:  # SyntaxError, ValueError of null bytes, MemoryError of deep nesting
        wire.write({"status": "syntax", "why": f"{type(e).__name__}: the program does not compile"})
        return None


def _function(module: ModuleType, name: str) -> Callable[..., Any]:
    """Return the function of that name; for "Class.method", of an instance made without arguments.

    Like other graders, take a method of `class Solution` if the module does not define the function itself.
    """
    found: Any = module
    own = getattr(getattr(module, name, None), "__module__", None) == module.__name__
    path = name if own or "." in name or not hasattr(getattr(module, "Solution", None), name) else f"Solution.{name}"
    for part in path.split("."):
        found = getattr(found() if isinstance(found, type) else found, part)
    if not callable(found):
        raise TypeError(f"{name} is not a function")
    return found


def _call(function: Callable[..., Any], line: bytes) -> bytes:
    request = codec.decode(codec.parse(line))
    try:
        return json.dumps(codec.encode(function(*request["args"], **request["kwargs"]))).encode()
    except SystemExit:
        os._exit(0)  # `calls` reports the missing result.


def _remote_function(wire: Wire) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        """Call the program's function in its own sandbox."""
        wire.write({"call": {"args": codec.encode(list(args)), "kwargs": codec.encode(kwargs)}})
        line = wire.read()
        if line is None:
            raise ProgramError("no answer")
        answer = codec.parse(line)
        if "value" in answer:
            return codec.decode(answer["value"])
        raise _RAISED.get(answer["raised"], ProgramError)(answer["raised"])

    return function
