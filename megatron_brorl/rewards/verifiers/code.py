"""Verifier `code`: the share of the row's tests that a program passes.

docs/sandbox.md describes the three forms of tests. The sandbox of the program contains no expected results. They are
in the worker process, or for asserts in a second sandbox.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_brorl.errors import UserError
from megatron_brorl.rewards.extract import after_thought
from megatron_brorl.rewards.sandbox import isolation
from megatron_brorl.rewards.sandbox.inside import codec
from megatron_brorl.rewards.sandbox.run import Outcome, Sandbox, require
from megatron_brorl.rewards.verifier import Score, Verifier, VerifierRow
from megatron_brorl.rewards.verifiers import code_blocks

_WRONG = Outcome("error", "wrong result")


def load() -> Verifier:
    """Return the verifier. Raises UserError if programs cannot be isolated and reward.unsandboxed is false."""
    sandbox = Sandbox(require('verifier "code"'), isolation.limits())
    return lambda answer, row: verify(answer, row, sandbox)


def verify(answer: str, row: VerifierRow, sandbox: Sandbox) -> Score:
    """Return the share of the row's tests that the program passes. answer: the result of `find`, or a program."""
    metadata = row["metadata"]
    has_input = any((test.get("input") or "").strip() for test in metadata.get("tests") or ())
    program = code_blocks.program(answer, metadata.get("function"), has_input, metadata.get("prelude", ""))
    if program is None:
        return Score(0.0, "no closed block of Python", {"tests": 0.0})
    outcomes = _outcomes(program, metadata, sandbox)
    passed = sum(outcome.status == "ok" for outcome in outcomes)
    share = passed / len(outcomes)
    reason = ""
    for number, outcome in enumerate(outcomes, start=1):
        if outcome.status != "ok":
            reason = f"{passed} of {len(outcomes)} tests; test {number}: {outcome.reason or outcome.status}"
            break
    return Score(share, reason, {"tests": share})


def find(text: str) -> str | None:
    """Return the only Python block after the thought, the text from the first block to the last, or None.

    With several blocks, `verify` selects the program, because the choice depends on the row.
    """
    text = after_thought(text)
    return None if text.lstrip().startswith("<think>") else code_blocks.blocks_of(text)


def check_row(row: VerifierRow, where: str) -> None:
    """Raise UserError unless the row has tests in one of the three forms."""
    metadata = row["metadata"]
    language = metadata.get("language", "python")
    if language != "python":
        raise UserError(f'{where}: verifier "code" supports only metadata.language = "python", not {language!r}')

    tolerance = metadata.get("tolerance", 0)
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not 0 <= tolerance < 1:
        raise UserError(f"{where}: metadata.tolerance = {tolerance!r}: must be a number in [0, 1)")
    function = metadata.get("function")
    if function is not None and not (isinstance(function, str) and all(map(str.isidentifier, function.split(".")))):
        raise UserError(f"{where}: metadata.function = {function!r}: must be the name of a function")

    _parsed(metadata.get("prelude", ""), f"{where}: metadata.prelude")
    if "asserts" in metadata:
        _check_asserts(metadata, where)
        return
    tests = metadata.get("tests")
    if not isinstance(tests, list) or not tests:
        raise UserError(f'{where}: verifier "code" needs metadata.tests, a list of tests, or metadata.asserts')
    for number, test in enumerate(tests):
        _check_test(test, function is not None, f"{where}: metadata.tests[{number}]")


def _check_asserts(metadata: Mapping[str, Any], where: str) -> None:
    if "tests" in metadata:
        raise UserError(f"{where}: metadata has both tests and asserts; keep one of them")
    if metadata.get("function") is None:
        raise UserError(f"{where}: metadata.asserts needs metadata.function, the name that they call")
    texts = _texts(metadata["asserts"])
    if not texts:
        raise UserError(f"{where}: metadata.asserts is empty; add at least one test")

    _parsed(metadata.get("setup", ""), f"{where}: metadata.setup")
    for text in texts:  # Without an assertion, every program would pass.
        if not any(isinstance(node, ast.Assert) for node in ast.walk(_parsed(text, f"{where}: metadata.asserts"))):
            raise UserError(f"{where}: metadata.asserts: {text[:60]!r} has no assert; add one to each text")


def _parsed(text: Any, where: str) -> ast.Module:
    if not isinstance(text, str):
        raise UserError(f"{where}: must be Python code as text, not {type(text).__name__}")
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError) as e:
        raise UserError(f"{where} is not Python: {e}") from None


def _check_test(test: Any, calls_function: bool, where: str) -> None:
    if not isinstance(test, dict):
        raise UserError(f"{where}: must be an object, not {type(test).__name__}")
    if not calls_function:
        if not isinstance(test.get("input"), str) or not isinstance(test.get("output"), str):
            raise UserError(f"{where}: needs input and output as strings, or set metadata.function")
        return
    kwargs = test.get("kwargs", {})
    if not isinstance(test.get("args"), list) or not isinstance(kwargs, dict) or "expected" not in test:
        raise UserError(f"{where}: needs args as a list, expected, and kwargs as an object if given")
    try:
        codec.decode([test["args"], kwargs, test["expected"]])
    except codec.Unencodable as e:
        raise UserError(f"{where}: {e}") from None


def _outcomes(program: str, metadata: Mapping[str, Any], sandbox: Sandbox) -> Sequence[Outcome]:
    """Return one outcome per test; "ok" means that it passed."""
    function, prelude = metadata.get("function"), metadata.get("prelude", "")
    tolerance = float(metadata.get("tolerance", 0))
    if "asserts" in metadata:
        texts = _texts(metadata["asserts"])
        return sandbox.asserts(program, function or "", metadata.get("setup", ""), texts, prelude)
    tests = metadata["tests"]
    if function is None:
        outcomes = sandbox.scripts(program, [test["input"] for test in tests], prelude)
        right = [same_text(o.stdout, test["output"], tolerance) for o, test in zip(outcomes, tests, strict=True)]
    else:
        outcomes = sandbox.calls(program, function, tests, prelude)
        expected = [codec.decode(test["expected"]) for test in tests]
        right = [same_value(o.value, value, tolerance) for o, value in zip(outcomes, expected, strict=True)]
    return [_WRONG if o.status == "ok" and not is_right else o for o, is_right in zip(outcomes, right, strict=True)]


def same_text(actual: str, expected: str, tolerance: float = 0.0) -> bool:
    """Compare two outputs line by line and word by word. Extra white space and trailing empty lines are ignored.

    Words that are numbers may differ by the tolerance, absolute or relative to the expected number.
    """
    return same_value(_words(actual), _words(expected), tolerance, words=True)


def same_value(actual: Any, expected: Any, tolerance: float = 0.0, words: bool = False) -> bool:
    """Compare two values strictly: True is not 1, and a list is not a set. A tuple matches an expected list.

    words: with a tolerance, also compare strings as numbers.
    """
    if isinstance(expected, (list, tuple)):
        kinds = (list, tuple) if isinstance(expected, list) else (tuple,)
        if not isinstance(actual, kinds) or len(actual) != len(expected):
            return False
        return all(same_value(a, e, tolerance, words) for a, e in zip(actual, expected, strict=True))
    if isinstance(expected, dict):
        if not isinstance(actual, dict) or _kinds(actual) != _kinds(expected):
            return False
        return all(same_value(actual[key], expected[key], tolerance, words) for key in expected)
    if isinstance(expected, (set, frozenset)):
        return isinstance(actual, (set, frozenset)) and _kinds(actual) == _kinds(expected)

    # Compare numbers by value, so that 2 equals 2.0, and other values by type and value.
    if words and tolerance and isinstance(actual, str) and actual != expected:
        return _near(_number(actual), _number(expected), tolerance)
    if _is_number(actual) and _is_number(expected):
        both_nan = actual != actual and expected != expected
        return both_nan or bool(actual == expected) or _near(actual, expected, tolerance)
    return type(actual) is type(expected) and bool(actual == expected)


def _words(text: str) -> list[list[str]]:
    # str.splitlines would also split at characters such as U+2028 and form feeds.
    lines = [line.split() for line in re.split(r"\r\n|\r|\n", text)]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _kinds(values: Any) -> set[Any]:
    """Return the members with a mark that distinguishes True from 1."""
    return {(isinstance(value, bool), value) for value in values}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, complex)) and not isinstance(value, bool)


def _number(word: str) -> float:
    try:
        return float(word) if "_" not in word else math.nan
    except ValueError:
        return math.nan


def _near(actual: Any, expected: Any, tolerance: float) -> bool:
    try:
        return bool(tolerance and abs(actual - expected) <= tolerance * max(1.0, abs(expected)))
    except OverflowError:
        return False


def _texts(asserts: Any) -> list[Any]:
    return asserts if isinstance(asserts, list) else [asserts]
