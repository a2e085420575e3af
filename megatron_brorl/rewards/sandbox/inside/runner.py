"""Run a program inside the sandbox: every test in a fork of its own, with a deadline and a limit on its output.

A program that has been loaded may control the runner. That gains it nothing: the messages are its results, and the
expected results are known only outside.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import io
import json
import os
import site
import sys
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any, NoReturn

from megatron_brorl.rewards.sandbox.inside import codec
from megatron_brorl.rewards.sandbox.inside.codec import Wire
from megatron_brorl.rewards.sandbox.inside.fork import Fork, exit_code


def scripts(wire: Wire, order: dict[str, Any]) -> None:
    """Run the program as a script once per request {"stdin"}."""
    code = _compiled(wire, order)
    gc.freeze()  # The garbage collection at a script's end then skips the objects that exist now.
    while code and (line := wire.read()) is not None:
        fork = Fork(order, codec.parse(line)["stdin"].encode("utf-8", "surrogatepass"))

        # The exit code and the text are the result.
        wire.write(fork.run(functools.partial(_run_script, code)) | {"result": "null"})


def calls(wire: Wire, order: dict[str, Any]) -> None:
    """Load the program once, then call its function once per request {"args", "kwargs"}."""
    code = _compiled(wire, order)
    if not code:
        return
    module = ModuleType("solution")
    sys.modules["solution"] = module
    function: Callable[..., Any] | str
    try:
        _load(code, module)
        function = _function(module, order["function"])
    except BaseException as e:  # includes SystemExit
        function = f"{type(e).__name__} while the program was loaded"
    while (line := wire.read()) is not None:
        if isinstance(function, str):
            wire.write({"status": "error", "why": function})
            continue
        message = Fork(order).run(functools.partial(_called, function, line))
        if message["status"] == "ok" and not message["result"]:
            message = {"status": "error", "why": "the program exited before the function returned"}
        wire.write(message)


def _run_script(code: CodeType) -> NoReturn:
    """Execute `code` as __main__, do what an interpreter does at its end, and exit with the program's code.

    Exceptions other than SystemExit pass. The interpreter's own end would free every module in a fresh fork, which
    takes several milliseconds per test.
    """
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["solution.py"]
    status = 0
    try:
        exec(code, module.__dict__)
    except SystemExit as e:
        status = exit_code(e.code)
    finally:
        flushed = _finish(module)
    os._exit(status if flushed else 120)


def _finish(module: ModuleType) -> bool:
    """Wait for threads, call atexit's functions, flush. Return False if text for standard output was lost."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    flushed = _flush_stdout()

    # Freeing the program's objects writes out its open files, closes its generators and calls __del__.
    sys.stdout = sys.__stdout__
    names = vars(module)
    for name in [name for name in names if name != "__builtins__"]:
        names[name] = None

    # The collector may close a file in a cycle before its buffer is written.
    for stream in gc.get_objects():
        if issubclass(type(stream), (io.TextIOWrapper, io.BufferedWriter)):
            with contextlib.suppress(Exception):
                stream.flush()
    gc.collect()
    return _flush_stdout() and flushed


def _flush_stdout() -> bool:
    stdout: Any = getattr(sys, "stdout", None)
    with contextlib.suppress(Exception):
        if stdout is not None and not getattr(stdout, "closed", False):
            stdout.flush()
        return True
    return False


def _load(code: CodeType, module: ModuleType) -> None:
    """Execute a program, which may exit with 0 once it has defined its function."""
    pid = os.getpid()
    try:
        exec(code, module.__dict__)
    except SystemExit as e:
        if exit_code(e.code):
            raise
    finally:
        if os.getpid() != pid:
            os._exit(0)  # A process that the program forked must not answer requests.


def _compiled(wire: Wire, order: dict[str, Any]) -> CodeType | None:
    site.setquit()  # Defines exit() and quit(), which the option -S leaves out.
    try:
        return compile(order["program"], "solution.py", "exec", dont_inherit=True)
    except BaseException as e:  # SyntaxError, ValueError of null bytes, MemoryError of deep nesting
        wire.write({"status": "syntax", "why": f"{type(e).__name__}: the program does not compile"})
        return None


def _function(module: ModuleType, name: str) -> Callable[..., Any]:
    """Return the function of that name; for "Class.method", of an instance made without arguments."""
    found: Any = module
    for part in name.split("."):
        found = getattr(found() if isinstance(found, type) else found, part)
    if not callable(found):
        raise TypeError(f"{name} is not a function")
    return found


def _called(function: Callable[..., Any], line: bytes) -> bytes:
    request = codec.decode(codec.parse(line))
    return json.dumps(codec.encode(function(*request["args"], **request["kwargs"]))).encode()
