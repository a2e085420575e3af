"""Programs with tests: Eurus-2-RL's code, HumanEval, MBPP."""

from __future__ import annotations

import ast
import json
from typing import Any

from megatron_brorl.data.sets.form import Raw, Task, Unusable, last_message, listed, nested, text

_EURUS_AFTER = "\n\nWrite Python code to solve the problem."  # and how to present it, for which a run has own words


def eurus(raw: Raw, where: str) -> Task:
    """prompt (messages), ability, reward_model.ground_truth: JSON of inputs, outputs and perhaps fn_name."""
    if text(raw, where, "ability") != "code":
        raise Unusable("not a row of code")
    problem = last_message(raw, where, "prompt").partition(_EURUS_AFTER)[0].strip()
    tests = _json(nested(raw, where, "reward_model", "ground_truth"))

    # As many outputs as inputs, and at least one.
    if not isinstance(tests, dict) or not all(isinstance(tests.get(key), list) for key in ("inputs", "outputs")):
        raise Unusable("tests without inputs or outputs")
    inputs, outputs = tests["inputs"], tests["outputs"]
    if not inputs or len(inputs) != len(outputs):
        raise Unusable("no tests, or not as many outputs as inputs")

    # A function by its name, or a program that reads and prints.
    name = tests.get("fn_name")
    if name:
        return Task(problem, None, "code", {"function": name, "tests": _calls(inputs, outputs)})
    pairs = [{"input": _lines(i), "output": _lines(o)} for i, o in zip(inputs, outputs, strict=True)]
    return Task(problem, None, "code", {"tests": pairs})


def humaneval(raw: Raw, where: str) -> Task:
    """task_id, prompt (a function without its body), test (a function check(candidate)), entry_point."""
    function = text(raw, where, "entry_point")
    asserts = _asserts_of_check(text(raw, where, "test"), function)
    metadata = {"function": function, "asserts": asserts}
    return Task(text(raw, where, "prompt").strip("\n"), None, "code", metadata, text(raw, where, "task_id"))


def mbpp(raw: Raw, where: str) -> Task:
    """text (or prompt, in the sanitized set), code, test_list. The tests are shown, as they are in the set's paper."""
    asserts = [str(line).strip() for line in listed(raw, where, "test_list")]
    setup = "\n".join([*(raw.get("test_imports") or []), (raw.get("test_setup_code") or "").strip()]).strip()
    function = _tested_function(text(raw, where, "code"), asserts)
    metadata = {"function": function, "asserts": asserts} | ({"setup": setup} if setup else {})
    shown = "\n".join(["Your code should pass these tests:", *asserts])
    return Task(f"{text(raw, where, 'text', 'prompt').strip()}\n\n{shown}", None, "code", metadata, _mbpp_id(raw))


def _mbpp_id(raw: Raw) -> str:
    number = raw.get("task_id")
    return "" if number is None else str(number)


def _json(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        raise Unusable("tests that are not JSON") from None


def _lines(value: Any) -> str:
    """Text for a program to read or print: as it is, or from a list of lines."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    raise Unusable("an input or output that is not text")


def _calls(inputs: list[Any], outputs: list[Any]) -> list[dict[str, Any]]:
    """Arguments and expected values of calls.

    The set has two ways to write them: values of JSON, the arguments one per line; or lists of arguments with each
    expected value in a list of one, as in APPS.
    """
    wrapped = all(isinstance(i, list) for i in inputs) and all(isinstance(o, list) and len(o) == 1 for o in outputs)
    calls = []
    for given, expected in zip(inputs, outputs, strict=True):
        arguments = [_json(line) for line in given.splitlines()] if isinstance(given, str) else given
        if not isinstance(arguments, list):
            raise Unusable("arguments that are no list")
        calls.append({"args": arguments, "expected": expected[0] if wrapped else _json(expected)})
    return calls


def _asserts_of_check(source: str, function: str) -> list[str]:
    """The asserts in the body of check(candidate), about the function by its name.

    A test with loops or random inputs is one text, as a whole.
    """
    body = [f.body for f in _parsed(source).body if isinstance(f, ast.FunctionDef) and f.name == "check"]
    if not body:
        raise Unusable("a test without check(candidate)")

    # One by one, so that a program's share of them can be told.
    asserts = []
    for line in body[0]:
        if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant):
            continue  # a docstring
        if not isinstance(line, ast.Assert):
            return [f"{source.strip()}\n\ncheck({function})"]
        # Some of the set's asserts are placeholders that say nothing of the function.
        if not any(isinstance(node, ast.Name) and node.id in ("candidate", function) for node in ast.walk(line.test)):
            continue
        asserts.append(ast.unparse(_Renamed(function).visit(ast.Assert(line.test, None))))
    if not asserts:
        raise Unusable("a test without asserts")
    return asserts


class _Renamed(ast.NodeTransformer):
    def __init__(self, function: str) -> None:
        self._function = function

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self._function, node.ctx) if node.id == "candidate" else node


def _tested_function(code: str, asserts: list[str]) -> str:
    """The function of the reference solution that the first assert calls."""
    defined = {node.name for node in _parsed(code).body if isinstance(node, ast.FunctionDef)}
    called = [
        node.func.id
        for line in asserts[:1]
        for node in ast.walk(_parsed(line))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in defined
    ]
    if not called:
        raise Unusable("tests that call none of the solution's functions")
    return called[0]


def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        raise Unusable("tests or solution that are no Python 3") from None
