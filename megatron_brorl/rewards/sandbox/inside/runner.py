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
import select
import signal
import site
import sys
import time
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any, NoReturn

from megatron_brorl.rewards.sandbox.inside import codec
from megatron_brorl.rewards.sandbox.inside.codec import Wire

# Exceptions of the program that are raised in a test. StopIteration would end a loop of the test early.
_RAISED: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        *(ArithmeticError, OverflowError, ZeroDivisionError, LookupError, IndexError, KeyError),
        *(AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError),
    )
}
_CHUNK = 1 << 16  # bytes to read or write at once


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
        # A script returns no value, so `result` is null. Its exit code and output are in the other fields.
        wire.write(fork.run(functools.partial(_run_script, code)) | {"result": "null"})


def calls(wire: Wire, job: dict[str, Any]) -> None:
    """Load the program once, then call its function once per request {"args", "kwargs"}."""
    code = _compiled(wire, job)
    if not code:
        return
    module = _module("solution")
    function: Callable[..., Any] | str
    try:
        # Hide the prelude's value of the name, such as math.gcd, while the program loads: it is not the program's.
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
    value: Any = module
    is_defined = getattr(getattr(module, name, None), "__module__", None) == module.__name__
    path = name
    if not is_defined and "." not in name and hasattr(getattr(module, "Solution", None), name):
        path = f"Solution.{name}"
    for attribute in path.split("."):
        value = getattr(value() if isinstance(value, type) else value, attribute)
    if not callable(value):
        raise TypeError(f"{name} is not a function")
    return value


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


class Fork:
    """Runs a function once in a child process with `stdin`, and returns its output and result as a message."""

    def __init__(self, job: dict[str, Any], stdin: bytes = b"") -> None:
        self._stdin = memoryview(stdin)
        self._seconds = job["test_seconds"]
        self._max_bytes = job["output_bytes"]
        self._has_namespace = job["has_namespace"]
        self._texts: dict[int, bytearray] = {}  # output so far, by file descriptor
        self._open: set[int] = set()  # file descriptors to close
        self._stopped = ""  # the status if the child has to be killed

    def run(self, body: Callable[[], bytes]) -> dict[str, Any]:
        """Return {"status": "ok" or the kind of failure, "why", "stdout", "result": the bytes of `body`, as text}.

        If `body` raises SystemExit, the child ends as CPython does at the end of a script. If the process exits with 0
        before `body` returns, the status is "ok" and the result "".
        """
        stdin_read, stdin_write = os.pipe()
        stdout_read, stdout_write = os.pipe()
        result_read, result_write = os.pipe()
        child = os.fork()
        if child == 0:
            _child(stdin_read, stdout_write, result_write, body)
        for end in (stdin_read, stdout_write, result_write):
            os.close(end)
        self._open = {stdin_write, stdout_read, result_read}

        # Kill the child and, in a namespace, all processes that it started.
        try:
            self._watch(child, stdin_write, stdout_read, result_read)
        finally:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            if self._has_namespace:
                _kill_all()
            for end in self._open:
                os.close(end)
        return self._message(status, bytes(self._texts[stdout_read]), bytes(self._texts[result_read]))

    def _watch(self, child: int, stdin: int, stdout: int, result: int) -> None:
        """Wait until the child ends, its time is up, or it writes too much."""
        exited = os.pidfd_open(child)
        poll = select.poll()
        self._texts = {stdout: bytearray(), result: bytearray()}
        for fd in (stdout, result, exited):
            poll.register(fd, select.POLLIN)
        os.set_blocking(stdin, False)
        poll.register(stdin, select.POLLOUT)
        deadline = time.monotonic() + self._seconds

        # The exit counts only after all output has been read from the pipes.
        while not self._stopped:
            left = deadline - time.monotonic()
            if left <= 0:
                self._stopped = "timeout"
                break
            ready = {fd for fd, _ in poll.poll(1000 * left)}
            if ready == {exited}:
                break
            for fd in ready - {exited}:
                is_open = self._feed(stdin) if fd == stdin else self._drain(fd)
                if not is_open:
                    poll.unregister(fd)
                    if fd == stdin:
                        self._open.remove(stdin)
                        os.close(stdin)  # ends the input of the child
        os.close(exited)

    def _feed(self, stdin: int) -> bool:
        try:
            self._stdin = self._stdin[os.write(stdin, self._stdin[:_CHUNK]) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            return False
        return bool(self._stdin)

    def _drain(self, fd: int) -> bool:
        data = os.read(fd, _CHUNK)
        self._texts[fd] += data
        if len(self._texts[fd]) > self._max_bytes:
            self._stopped = "output"
        return bool(data)

    def _message(self, status: int, stdout: bytes, result: bytes) -> dict[str, Any]:
        text = stdout.decode("utf-8", "replace")
        result_text = result.decode("utf-8", "replace")
        if self._stopped:
            return {"status": self._stopped, "why": "", "stdout": ""}
        if os.WIFSIGNALED(status):
            return {"status": "crash", "why": signal.Signals(os.WTERMSIG(status)).name, "stdout": text}
        if os.WEXITSTATUS(status):
            return {"status": "error", "why": result_text or f"exit code {os.WEXITSTATUS(status)}", "stdout": text}
        return {"status": "ok", "why": "", "stdout": text, "result": result_text}


def _child(stdin: int, stdout: int, result: int, body: Callable[[], bytes]) -> NoReturn:
    pid = os.getpid()
    # The pipes get the numbers 0, 1 and, for the result, 3. Every other file except stderr is closed.
    for end, number in ((os.dup(stdin), 0), (os.dup(stdout), 1), (os.dup(result), 3)):
        os.dup2(end, number)
    os.closerange(4, 256)
    try:
        returned = body()
    except SystemExit:
        raise  # The interpreter runs its own shutdown.
    except BaseException as e:
        _write_result(pid, type(e).__name__.encode("utf-8", "replace")[:100])
        sys.exit(1)
    _write_result(pid, returned)
    os._exit(0)


def _write_result(pid: int, text: bytes) -> None:
    # A process that the program forked may reach this line. Only process `pid` may write the result.
    if os.getpid() == pid:
        os.write(3, text)


def _kill_all() -> None:
    # Kill all processes of the namespace except process 1 and this one. They may exist for a moment longer.
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(-1, signal.SIGKILL)
            time.sleep(1e-4)
