"""A program as a script: run to its end, with all that an interpreter still does there and that shows in the output.

The interpreter's own end would cost several milliseconds a test, because it frees every module in a fresh fork.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import sys
from types import CodeType, ModuleType
from typing import Any, NoReturn

from megatron_brorl.rewards.sandbox.inside.fork import exit_code


def run(code: CodeType) -> NoReturn:
    """Execute `code` as __main__ and exit with its code. Let exceptions other than SystemExit pass."""
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
