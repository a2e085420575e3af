"""No tests: problems of our own in the three forms, with a right program, a wrong one and one that is right in part."""

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
    """Programs are bodies of one expression."""
    rows = [{"args": args, "expected": expected} for args, expected in tests]
    forms = (f"import math, re, collections\n{name} = lambda {body}" for body in (right, wrong, part))
    return Problem({"function": name, "tests": rows}, *forms, share)


def _asserts(name: str, right: str, wrong: str, part: str, share: float, *tests: str) -> Problem:
    forms = (f"import math, re, collections\n{name} = lambda {body}" for body in (right, wrong, part))
    return Problem({"function": name, "asserts": [f"assert {test}" for test in tests]}, *forms, share)


INTS = "map(int, input().split())"
SCRIPTS = [
    _script(f"print(sum({INTS}))", "print(0)", "print(input().split()[1])", 0.5, ("0 7", "7"), ("1 2", "3")),
    _script("print(input()[::-1])", "print(1)", "print(input())", 0.5, ("aba", "aba"), ("ab", "ba")),
    _script("print(len(input()))", "print(-1)", "print(3)", 0.5, ("abc", "3"), ("\n", "0")),
    _script(f"print(max({INTS}))", "print('x')", f"print([*{INTS}][-1])", 0.5, ("3 1", "3"), ("1 4", "4")),
    _script("print(input().upper())", "print()", "print(input())", 0.5, ("A", "A"), ("b", "B")),
    _script("n = int(input())\nfor i in range(n): print(i)", "print(9)", "print(0)", 0.5, ("1", "0"), ("3", "0\n1\n2")),
    _script(f"a, b = {INTS}; print(a % b)", "print(-5)", "print(1)", 0.5, ("7 3", "1"), ("8 3", "2")),
    _script("print(*sorted(input().split()))", "print('z')", "print(input())", 0.5, ("a b", "a b"), ("b a", "a b")),
    _script("print(bin(int(input()))[2:])", "print(2)", "print(1)", 0.5, ("1", "1"), ("5", "101")),
    _script("print(input().count('a'))", "print(7)", "print(0)", 0.5, ("b", "0"), ("aa", "2")),
    _script("import math; print(math.factorial(int(input())))", "print(0)", "print(1)", 0.5, ("0", "1"), ("5", "120")),
    _script(
        f"print('yes' if len({{*{INTS}}}) == 1 else 'no')", "print()", "print('no')", 0.5, ("1 2", "no"), ("2 2", "yes")
    ),
    _script(f"import math; print(math.gcd(*{INTS}))", "print(0)", "print(1)", 0.5, ("3 4", "1"), ("8 12", "4")),
    _script(
        "import sys; print(len(sys.stdin.readlines()))", "print(9)", "print(1)", 0.5, ("a\n", "1"), ("a\nb\n", "2")
    ),
    _script("print(input().title())", "print(5)", "print(input())", 0.5, ("A B", "A B"), ("a b", "A B")),
    _script("s = input(); print(s == s[::-1])", "print(3)", "print(True)", 0.5, ("aa", "True"), ("ab", "False")),
    _script("print(sum(map(int, input())))", "print(-1)", "print(input())", 0.5, ("7", "7"), ("12", "3")),
    _script("while (n := int(input())): print(n * n)", "print(8)", "print(1)", 0.5, ("1\n0", "1"), ("2\n3\n0", "4\n9")),
    _script("print(int(input(), 16))", "print(-1)", "print(int(input()))", 0.5, ("9", "9"), ("ff", "255")),
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
    _function("rev", "x: x[::-1]", "x: 1", "x: x", 0.5, ([[1, 1]], [1, 1]), ([[1, 2]], [2, 1])),
    _function("even", "n: n % 2 == 0", "n: n", "n: True", 0.5, ([2], True), ([3], False)),
    _function("swap", "a, b: (b, a)", "a, b: None", "a, b: (a, b)", 0.5, ([1, 1], [1, 1]), ([1, 2], [2, 1])),
    _function("head", "x: x[0]", "x: x", "x: 1", 0.5, ([[1, 2]], 1), ([[3]], 3)),
    _function("words", "s: s.split()", "s: s", "s: [s]", 0.5, (["a"], ["a"]), (["a b"], ["a", "b"])),
    _function("freq", "s: collections.Counter(s)", "s: s", "s: {'a': 1}", 0.5, (["a"], {"a": 1}), (["bb"], {"b": 2})),
    _function("neg", "x: -x", "x: str(x)", "x: x", 0.5, ([0], 0), ([1], -1)),
    _function("half", "x: x / 2", "x: [x]", "x: x // 2", 0.5, ([4], 2), ([3], 1.5)),
    _function("nothing", "x: None", "x: 0", "x: x", 0.5, ([None], None), ([1], None)),
    _function("flat", "x: sum(x, [])", "x: x", "x: [1]", 0.5, ([[[1]]], [1]), ([[[1], [2]]], [1, 2])),
    _function("fact", "n: math.factorial(n)", "n: 0", "n: n", 0.5, ([1], 1), ([20], 2432902008176640000)),
    _function("join", "x: ','.join(x)", "x: x", "x: x[0]", 0.5, ([["a"]], "a"), ([["a", "b"]], "a,b")),
    _function("unique", "x: len({*x})", "x: -1", "x: len(x)", 0.5, ([[1]], 1), ([[1, 1]], 1)),
    _function("square", "x: [i * i for i in x]", "x: 1", "x: x", 0.5, ([[1]], [1]), ([[2]], [4])),
    _function("vowels", "s: len(re.findall('[aeiou]', s))", "s: s", "s: 1", 0.5, (["a"], 1), (["ae"], 2)),
    _function("digits", "n: [*map(int, str(n))]", "n: n", "n: [n]", 0.5, ([1], [1]), ([12], [1, 2])),
    _function("clip", "x, a, b: max(a, min(b, x))", "x, a, b: '1'", "x, a, b: x", 0.5, ([1, 0, 2], 1), ([3, 0, 2], 2)),
    _function("get", "d, k: d.get(k)", "d, k: d", "d, k: d[k]", 0.5, ([{"a": 1}, "a"], 1), ([{}, "a"], None)),
    _function(
        "prime",
        "n: n > 1 and all(n % i for i in range(2, math.isqrt(n) + 1))",
        "n: 1",
        "n: n % 2 == 1",
        0.75,
        *(([2 * 3 + 1], True), ([4], False), ([9], False), ([97], True)),
    ),
]
ASSERTS = [
    _asserts("add", "a, b: a + b", "a, b: None", "a, b: b", 0.5, "add(0, 2) == 2", "add(1, 2) == 3"),
    _asserts("pair", "a: (a, a)", "a: a", "a: (1, 1)", 0.5, "pair(1) == (1, 1)", "pair((2,)) == ((2,), (2,))"),
    _asserts("bag", "x: set(x)", "x: 0", "x: {1}", 0.5, "bag([1, 1]) == {1}", "bag((1, 2)) == {1, 2}"),
    _asserts("root", "x: math.sqrt(x)", "x: -1", "x: x", 0.5, "root(1) == 1", "abs(root(2) - 1.41421) < 1e-5"),
    _asserts("turn", "z: z * 1j", "z: None", "z: 1j", 0.5, "turn(1) == 1j", "turn(1j) == -1"),
    _asserts("keys", "d: sorted(d)", "d: d", "d: [1]", 0.5, "keys({1: 'a'}) == [1]", "keys({2: 0, 1: 0}) == [1, 2]"),
    _asserts("text", "b: b.decode()", "b: b", "b: 'a'", 0.5, "text(b'a') == 'a'", "text(b'bc') == 'bc'"),
    _asserts("size", "*a: len(a)", "*a: -1", "*a: 2", 0.5, "size(1, 2) == 2", "size() == 0"),
    _asserts("opt", "a=1: a", "a=0: None", "a=1: 1", 0.5, "opt() == 1", "opt(a=3) == 3"),
    _asserts("big", "n: 2 ** n", "n: 0", "n: 2", 0.5, "big(1) == 2", "big(200) == 1 << 200"),
    _asserts("inf", "x: x * math.inf", "x: 0", "x: math.inf", 0.5, "inf(1) == float('inf')", "inf(-1) < -1e300"),
    _asserts("none", "x: None", "x: 1", "x: x", 0.5, "none(None) is None", "none(1) is None"),
    _asserts("nest", "n: [[n]]", "n: n", "n: [[1]]", 0.5, "nest(1) == [[1]]", "nest(2)[0][0] == 2"),
    _asserts("both", "a, b: a and b", "a, b: 5", "a, b: True", 0.5, "both(True, True) is True", "both(1, 0) == 0"),
    _asserts("items", "d: [*d.items()]", "d: d", "d: [(1, 2)]", 0.5, "items({1: 2}) == [(1, 2)]", "items({}) == []"),
    _asserts("low", "s: s.lower()", "s: 1", "s: s", 0.5, "low('a') == 'a'", "low('ÄB') == 'äb'"),
    _asserts(
        "froz", "x: frozenset(x)", "x: 1", "x: frozenset()", 0.5, "froz('') == frozenset()", "froz('ab') == {'a', 'b'}"
    ),
    _asserts("nth", "x, i: x[i]", "x, i: x", "x, i: x[0]", 0.5, "nth('ab', 0) == 'a'", "nth((1, 2), -1) == 2"),
    _asserts("mean", "x: sum(x) / len(x)", "x: 'm'", "x: x[0]", 0.5, "mean([1, 1]) == 1", "mean([1, 2]) == 1.5"),
    _asserts(
        "cut",
        "s, n: [s[i:i + n] for i in range(0, len(s), n)]",
        "s, n: s",
        "s, n: [s]",
        0.5,
        "cut('ab', 2) == ['ab']",
        "[len(c) for c in cut('x' * 1000, 300)] == [300, 300, 300, 100]",
    ),
]
