"""Code problems for the tests of verifier `code`, in three forms: scripts, functions and assert statements.

Each problem has a correct program, a wrong one and one that passes only some of the tests.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Problem(NamedTuple):
    metadata: dict[str, Any]
    right: str
    wrong: str
    part: str  # passes `share` of the tests
    share: float


def _script(right: str, wrong: str, part: str, share: float, *tests: tuple[str, str]) -> Problem:
    rows = [{"input": given, "output": expected} for given, expected in tests]
    return Problem({"tests": rows}, right, wrong, part, share)


def _function(name: str, right: str, wrong: str, part: str, share: float, *tests: tuple[list[Any], Any]) -> Problem:
    """Make a problem from programs that are the bodies of a lambda."""
    rows = [{"args": args, "expected": expected} for args, expected in tests]
    forms = (f"import math, re, collections\n{name} = lambda {body}" for body in (right, wrong, part))
    return Problem({"function": name, "tests": rows}, *forms, share)


def _asserts(name: str, right: str, wrong: str, part: str, share: float, *tests: str) -> Problem:
    forms = (f"import math, re, collections\n{name} = lambda {body}" for body in (right, wrong, part))
    return Problem({"function": name, "asserts": [f"assert {test}" for test in tests]}, *forms, share)


INTS = "map(int, input().split())"
SCRIPTS = [
    _script(f"print(sum({INTS}))", "print(0)", "print(input().split()[1])", 0.5, ("0 7", "7"), ("1 2", "3")),
    _script("n = int(input())\nfor i in range(n): print(i)", "print(9)", "print(0)", 0.5, ("1", "0"), ("3", "0\n1\n2")),
    _script("while (n := int(input())): print(n * n)", "print(8)", "print(1)", 0.5, ("1\n0", "1"), ("2\n3\n0", "4\n9")),
    _script(
        "n = int(input())\na, b = 0, 1\nfor _ in range(n): a, b = b, a + b\nprint(a)",
        "def f(n): return n if n < 2 else f(n-1) + f(n)\nprint(f(int(input()) + 2))",
        "n = int(input())\nif n > 50: raise ValueError\na, b = 0, 1\nfor _ in range(n): a, b = b, a + b\nprint(a)",
        0.75,
        *(("1", "1"), ("10", "55"), ("30", "832040"), ("90", "2880067194370816120")),
    ),
]
FUNCTIONS = [
    _function("add", "a, b: a + b", "a, b: None", "a, b: b", 0.5, ([0, 2], 2), ([1, 2], 3)),
    _function("swap", "a, b: (b, a)", "a, b: None", "a, b: (a, b)", 0.5, ([1, 1], [1, 1]), ([1, 2], [2, 1])),
    _function("freq", "s: collections.Counter(s)", "s: s", "s: {'a': 1}", 0.5, (["a"], {"a": 1}), (["bb"], {"b": 2})),
    _function("nothing", "x: None", "x: 0", "x: x", 0.5, ([None], None), ([1], None)),
    _function("fact", "n: math.factorial(n)", "n: 0", "n: n", 0.5, ([1], 1), ([20], 2432902008176640000)),
    _function("get", "d, k: d.get(k)", "d, k: d", "d, k: d[k]", 0.5, ([{"a": 1}, "a"], 1), ([{}, "a"], None)),
]
ASSERTS = [
    _asserts("add", "a, b: a + b", "a, b: None", "a, b: b", 0.5, "add(0, 2) == 2", "add(1, 2) == 3"),
    _asserts("bag", "x: set(x)", "x: 0", "x: {1}", 0.5, "bag([1, 1]) == {1}", "bag((1, 2)) == {1, 2}"),
    _asserts("turn", "z: z * 1j", "z: None", "z: 1j", 0.5, "turn(1) == 1j", "turn(1j) == -1"),
    _asserts("text", "b: b.decode()", "b: b", "b: 'a'", 0.5, "text(b'a') == 'a'", "text(b'bc') == 'bc'"),
]
