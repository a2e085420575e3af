"""Run Python tests in a different sandbox from the program under test.

The tests call a stand-in for the program's function. The stand-in sends the arguments out as JSON and returns the
decoded result, which has only builtin types. The program therefore cannot read or change a test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_brorl.rewards.sandbox.inside import codec
from megatron_brorl.rewards.sandbox.inside.codec import Wire

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


def judge(wire: Wire, order: dict[str, Any]) -> None:
    """Run the test {"test"} of each request. Write {"call"} for each call, and {"passed", "why"} at the end."""
    name = order["function"]
    function = _stand_in(wire)
    while (line := wire.read()) is not None:
        names: dict[str, Any] = {"__name__": "tests", name: function}
        try:
            exec(compile(order["program"], "setup.py", "exec", dont_inherit=True), names)
            exec(compile(codec.parse(line)["test"], "test.py", "exec", dont_inherit=True), names)
            if callable(names.get("check")):  # HumanEval's form
                names["check"](function)
        except BaseException as e:  # Includes SystemExit: a test that ends early has not passed.
            wire.write({"passed": False, "why": f"{type(e).__name__}: {e}".removesuffix(": ")[:200]})
        else:
            wire.write({"passed": True, "why": ""})


def _stand_in(wire: Wire) -> Callable[..., Any]:
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
