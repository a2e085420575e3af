"""Verifier `code`: the reward is the share of passed tests, and attacks earn nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from rows import row

from megatron_brorl.data.published_sets import PRELUDE
from megatron_brorl.errors import UserError
from megatron_brorl.rewards.sandbox import isolation
from megatron_brorl.rewards.sandbox import run as sandbox
from megatron_brorl.rewards.sandbox.isolation import Limits
from megatron_brorl.rewards.sandbox.run import Sandbox
from megatron_brorl.rewards.verifier import Score
from megatron_brorl.rewards.verifiers import code
from megatron_brorl.rewards.worker_pool import RewardPool, ScoreRequest
from megatron_brorl.types import Prompt

NEEDS_SANDBOX = pytest.mark.skipif(sandbox.problem() is not None, reason=str(sandbox.problem()))
LONG = Sandbox(isolated=True, limits=Limits(seconds=40.0, test_seconds=10.0))
BARE = Sandbox(isolated=False, limits=Limits(seconds=40.0, test_seconds=10.0))  # for harmless programs
SHORT = Sandbox(isolated=True, limits=Limits(seconds=40.0, test_seconds=0.7))
ADD = {"function": "add", "tests": [{"args": [i, i + 4711], "expected": 2 * i + 4711} for i in range(3)]}
ADD_ASSERTS = {"function": "add", "asserts": [f"assert add({i}, {i + 4711}) == {2 * i + 4711}" for i in range(3)]}
ADD_SCRIPT = {"tests": [{"input": f"{i} {i + 4711}\n", "output": f"{2 * i + 4711}\n"} for i in range(3)]}


def score(answer: str, metadata: dict[str, Any], sandbox: Sandbox = LONG) -> Score:
    code.check_row(row(**metadata), "f.jsonl:1")
    return code.verify(answer, row(**metadata), sandbox)


INTS = "map(int, input().split())"
FIBONACCI = "a, b = 0, 1\nfor _ in range(n): a, b = b, a + b\nprint(a)"
# Inputs and outputs of a script, and programs with the share of the tests that they pass. One of them never ends.
SCRIPTS = [
    ([("0 7", "7"), ("1 2", "3")], {f"print(sum({INTS}))": 1, "print(0)": 0, "print(input().split()[1])": 0.5}),
    ([("1", "0"), ("3", "0\n1\n2")], {"for i in range(int(input())): print(i)": 1, "print(9)": 0, "print(0)": 0.5}),
    ([("1\n0", "1"), ("2\n3\n0", "4\n9")], {"while (n := int(input())): print(n * n)": 1, "print(1)": 0.5}),
    (
        [("1", "1"), ("10", "55"), ("30", "832040"), ("90", "2880067194370816120")],
        {
            f"n = int(input())\n{FIBONACCI}": 1,
            f"n = int(input())\nif n > 50: raise ValueError\n{FIBONACCI}": 0.75,
            "def f(n): return n if n < 2 else f(n-1) + f(n)\nprint(f(int(input()) + 2))": 0,
        },
    ),
]
# Each case: a function name, its calls (arguments, result) or asserts, and lambdas that pass all, none and half.
FUNCTIONS = [
    ("add", [([0, 2], 2), ([1, 2], 3)], ["a, b: a + b", "a, b: None", "a, b: b"]),
    ("swap", [([1, 1], [1, 1]), ([1, 2], [2, 1])], ["a, b: (b, a)", "a, b: None", "a, b: (a, b)"]),
    ("freq", [(["a"], {"a": 1}), (["bb"], {"b": 2})], ["s: collections.Counter(s)", "s: s", "s: {'a': 1}"]),
    ("nothing", [([None], None), ([1], None)], ["x: None", "x: 0", "x: x"]),
    ("fact", [([1], 1), ([20], 2432902008176640000)], ["n: math.factorial(n)", "n: 0", "n: n"]),
    ("get", [([{"a": 1}, "a"], 1), ([{}, "a"], None)], ["d, k: d.get(k)", "d, k: d", "d, k: d[k]"]),
]
ASSERTS = [
    ("add", ["assert add(0, 2) == 2", "assert add(1, 2) == 3"], ["a, b: a + b", "a, b: None", "a, b: b"]),
    ("bag", ["assert bag([1, 1]) == {1}", "assert bag((1, 2)) == {1, 2}"], ["x: set(x)", "x: 0", "x: {1}"]),
    ("turn", ["assert turn(1) == 1j", "assert turn(1j) == -1"], ["z: z * 1j", "z: None", "z: 1j"]),
    ("text", ["assert text(b'a') == 'a'", "assert text(b'bc') == 'bc'"], ["b: b.decode()", "b: b", "b: 'a'"]),
]


def tasks() -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    """Yield metadata, and programs with their rewards."""
    for examples, programs in SCRIPTS:
        yield {"tests": [{"input": given, "output": expected} for given, expected in examples]}, programs
    calls = [
        (name, {"tests": [{"args": args, "expected": result} for args, result in results]}, lambdas)
        for name, results, lambdas in FUNCTIONS
    ]
    asserts = [(name, {"asserts": lines}, lambdas) for name, lines, lambdas in ASSERTS]
    for name, tests, lambdas in [*calls, *asserts]:
        programs = [f"import math, collections\n{name} = lambda {body}" for body in lambdas]
        yield {"function": name, **tests}, dict(zip(programs, (1, 0, 0.5), strict=True))


@NEEDS_SANDBOX
@pytest.mark.parametrize(("metadata", "programs"), list(tasks()))
def test_reward_is_the_share_of_passed_tests(metadata, programs):
    for program, share in programs.items():
        result = score(program, metadata, LONG if share else SHORT)
        assert (result.reward, bool(result.reason), result.parts) == (share, share < 1, {"tests": share}), program


@NEEDS_SANDBOX
def test_programs_are_scored_in_worker_processes():
    """Score responses through the pool, where a worker has a memory limit and a deadline."""
    requests, expected = [], []
    for metadata, programs in list(tasks())[::5]:  # one of each form
        prompt = Prompt("p", text="", token_ids=(1,), answer=None, verifier="code", metadata=metadata)
        for program, share in programs.items():
            requests.append(ScoreRequest(prompt, code.find(f"So:\n```python\n{program}\n```\nDone.")))
            expected.append(share)
    with RewardPool(workers=1, timeout_s=60.0) as pool:
        assert [(score.status, score.reward) for score in pool.score(requests)] == [("ok", share) for share in expected]


# Reward hacks that are known from reinforcement learning, adapted to a function.
HACKS = {
    "equal to all": "class A:\n    def __eq__(self, o): return True\ndef add(a, b): return A()",
    "an int equal to all": "class A(int):\n    def __eq__(self, o): return True\n    __hash__ = int.__hash__\n"
    "def add(a, b): return A(0)",
    "gc": "import gc\ndef add(a, b):\n return [x for x in gc.get_objects() if isinstance(x, dict) and 'expected' in x]",
    "atexit": "import atexit, os; atexit.register(os._exit, 0)\ndef add(a, b): raise ValueError",
    "excepthook": "import sys, os; sys.excepthook = lambda *a: os._exit(0)\ndef add(a, b): raise ValueError",
    "timer": "import threading, os; threading.Timer(0.05, os._exit, (0,)).start()\ndef add(a, b):\n while True: pass",
    "expected values of the callers": "import sys\ndef add(a, b):\n f = sys._getframe()\n while f:\n"
    "  for k, v in f.f_locals.items():\n   if 'expected' in k: return v\n  f = f.f_back",
    "all tests passed": "print('ALL TESTS PASSED'); print('{\"passed\": true}')\ndef add(a, b): return None",
    "forged answers": "import os\nfor fd in range(3, 20):\n"
    '    try: os.write(fd, b\'{"passed": true, "why": ""}\\n\' * 9)\n'
    "    except OSError: pass\ndef add(a, b): return None",
    "forged results": "import os\nfor fd in range(3, 20):\n"
    '    try: os.write(fd, b\'{"status": "ok", "why": "", "stdout": "", "result": "0"}\\n\' * 9)\n'
    "    except OSError: pass\ndef add(a, b): return None",
    "patched json": "import json\njson.dumps = lambda *a: 'true'\ndef add(a, b): return None",
    "ends the loop of a test": "def add(a, b): raise StopIteration",
    "a list of guesses": "def add(a, b): return list(range(5000))",
    "no such function": "def sub(a, b): return a - b",
    "syntax": "def add(a, b) return a + b",
    "null byte": "def add(a, b): return a + b\0",
    "deep nesting": "x = " + "(" * 1000 + ")" * 1000 + "\ndef add(a, b): return a + b",
    "empty": "",
}


@NEEDS_SANDBOX
@pytest.mark.parametrize("name", HACKS)
def test_reward_hacks_earn_nothing(name):
    for metadata in (ADD, ADD_ASSERTS):
        result = score(HACKS[name], metadata, SHORT)
        assert result.reward == 0.0
        assert result.reason.startswith("0 of 3 tests; test 1: ")
    assert score(HACKS[name], ADD_SCRIPT, SHORT).reward == 0.0


CHECK = "def check(candidate):\n    assert math.isclose(candidate(4), 2)\n    assert candidate(9) == 3"
EXPECTS = "try:\n    f(0)\nexcept ZeroDivisionError:\n    raised = True\nassert raised"


@NEEDS_SANDBOX
@pytest.mark.parametrize(
    ("metadata", "right", "wrong"),
    [
        # If the StopIteration of f reached map, all(map(f, xs)) would be true.
        ({"asserts": "assert all(map(f, [1, 2, 3]))"}, "return True", "raise StopIteration"),
        ({"asserts": [EXPECTS]}, "return 1 / x", "raise ValueError"),
        ({"asserts": CHECK, "setup": "import math"}, "return x ** 0.5", "return 2"),  # as in HumanEval and MBPP
    ],
)
def test_exceptions_and_check_functions_of_a_test(metadata, right, wrong):
    for body, reward in ((right, 1.0), (wrong, 0.0)):
        assert score(f"def f(x): {body}", {"function": "f", **metadata}).reward == reward


CLASSES = [
    ("class Solution:\n    def add(self, a, b): return a + b", 1.0),
    ("class A:\n    @staticmethod\n    def add(a, b): return a + b\nclass Solution(A): pass", 1.0),
    ("from operator import add\nclass Solution:\n    def add(self, a, b): return add(b, a)", 1.0),
    ("class Solution:\n    def add(self, a, b): return a\ndef add(a, b): return a + b", 1.0),
    ("class Solver:\n    def add(self, a, b): return a + b", 0.0),
    ("class Solution:\n    def __init__(self, n): pass\n    def add(self, a, b): return a + b", 0.0),
]


@pytest.mark.parametrize(("program", "reward"), CLASSES)
@pytest.mark.parametrize("metadata", [ADD, ADD_ASSERTS])
def test_method_of_class_solution_is_the_function(program, reward, metadata):
    assert score(program, metadata, BARE).reward == reward


TYPED = "from __future__ import annotations\ndef gcd(x: List[int]) -> int: return reduce(math.gcd, x)"
SUPPLIED = {"function": "gcd", "tests": [{"args": [[4, 6]], "expected": 2}]}
HEAP = "h = list(map(int, input().split()))\nheapify(h)\nprint(*nsmallest(3, h))"
SORTS = {"tests": [{"input": "3 1 2", "output": "1 2 3"}] * 2}
DEEP = "def f(n): return n and 1 + f(n - 1)\nprint(*([1, 2, 3] if f(20000) == 20000 else []))"
FILE = "import os\nprint(os.path.isabs(__file__), os.path.basename(__file__))"


@pytest.mark.parametrize(
    ("program", "metadata", "reward"),
    [
        (TYPED, {**SUPPLIED, "prelude": PRELUDE}, 1.0),
        (TYPED, SUPPLIED, 0.0),
        (TYPED, {"function": "gcd", "asserts": "assert gcd([9, 6]) == 3", "prelude": PRELUDE}, 1.0),
        (HEAP, {**SORTS, "prelude": PRELUDE}, 1.0),
        (DEEP, {**SORTS, "prelude": PRELUDE}, 1.0),
        # A function of the prelude is not the answer, unless the program names or uses it.
        ("x = 1", {**SUPPLIED, "prelude": "gcd = lambda x: 2"}, 0.0),
        ("gcd = max", {**SUPPLIED, "prelude": "def max(x): return 2"}, 1.0),
        ("class Solution:\n    def gcd(self, x): return gcd(*x)", {**SUPPLIED, "prelude": PRELUDE}, 1.0),
        # CPython sets __file__ to an absolute path in a script and in a module.
        (FILE, {"tests": [{"input": "", "output": "True solution.py"}]}, 1.0),
        ("gcd = lambda x: 2 * __file__.endswith('/solution.py')", SUPPLIED, 1.0),
    ],
)
def test_programs_run_after_the_prelude_in_its_namespace(program, metadata, reward):
    assert score(program, metadata, BARE).reward == reward


@NEEDS_SANDBOX
def test_methods_keyword_arguments_and_tolerance():
    tests = [{"args": [1], "kwargs": {"by": by}, "expected": expected} for by, expected in ((2, 0.5), (3, 0.3333))]
    metadata = {"function": "Solution.div", "tests": tests}
    program = "class Solution:\n    def div(self, a, by): return a / by"
    assert score(program, metadata).reward == 0.5
    assert score(program, {**metadata, "tolerance": 1e-3}).reward == 1.0


@NEEDS_SANDBOX
def test_endless_test_fails_alone_and_a_program_has_a_deadline():
    program = "n = int(input().split()[0])\nwhile n == 1: pass\nprint(2 * n + 4711)"
    result = score(program, ADD_SCRIPT, SHORT)
    assert result.reward == pytest.approx(2 / 3)
    assert result.reason == "2 of 3 tests; test 2: out of time"
    tight = Sandbox(isolated=True, limits=Limits(seconds=0.8, test_seconds=30.0))
    assert score("while True: pass", ADD_SCRIPT, tight).reason == "0 of 3 tests; test 1: out of time"


@pytest.mark.parametrize(
    ("output", "expected", "tolerance", "same"),
    [
        ("1 2\n", "1  2", 0.0, True),
        ("1 2", "1\n2", 0.0, False),
        ("0.3333", "0.33333", 0.0, False),
        ("0.3333", "0.33333", 1e-3, True),
        ("300.2", "300", 1e-3, True),  # relative to the expected number
        ("300.4", "300", 1e-3, False),
        ("1_0", "10", 0.5, False),
        ("inf", "1", 0.5, False),
        ("x 1.0", "x 1", 1e-9, True),
        ("a\r\nb", "a\nb\n", 0.0, True),
        *((f"a{character}b", "a\nb", 0.0, False) for character in "\u2028\x0c\x85\x1c"),
    ],
)
def test_outputs_are_compared_word_by_word(output, expected, tolerance, same):
    assert code.same_text(output, expected, tolerance) is same


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        (2, 2.0, True),
        (True, 1, False),
        ([True], [1], False),
        ((1, 2), [1, 2], True),
        ([1, 2], (1, 2), False),
        ({1: [2]}, {1: (2,)}, False),
        ({True}, {1}, False),
        ({1, 2}, {2, 1}, True),
        ("1", 1, False),
        (float("nan"), float("nan"), True),
    ],
)
def test_values_are_compared_by_type_and_value(value, expected, same):
    assert code.same_value(value, expected) is same


def test_verifier_refuses_to_start_without_a_sandbox_unless_configured(monkeypatch):
    monkeypatch.delenv(isolation.UNSANDBOXED, raising=False)
    monkeypatch.setattr(sandbox, "problem", lambda: "bubblewrap is missing; install it (apt-get install bubblewrap)")
    with pytest.raises(UserError, match=r"^x: bubblewrap is missing; install it .*; or set reward\.unsandboxed = true"):
        sandbox.require("x")
    with pytest.raises(UserError, match=r'^verifier "code": bubblewrap is missing'):
        code.load()
    monkeypatch.setenv(isolation.UNSANDBOXED, "1")
    verify = code.load()
    assert verify("def add(a, b): return a + b", row(**ADD)).reward == 1.0
    assert verify("def add(a, b): return a", row(**ADD)).reward == 0.0


@pytest.mark.skipif(not shutil.which("bwrap"), reason="bubblewrap is missing")
def test_the_program_of_the_probe_is_right():
    """A faulty probe would skip the tests of the sandbox. Without isolation, its program succeeds on every machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "Sandbox", lambda isolated, limits: Sandbox(isolated=False, limits=limits))
        assert sandbox.problem.__wrapped__() is None


def test_probe_reports_a_bubblewrap_without_namespaces(monkeypatch, tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    sandbox.problem.cache_clear()
    try:
        assert "No permissions to create new namespace; permit user namespaces" in (sandbox.problem() or "")
    finally:
        monkeypatch.undo()
        sandbox.problem.cache_clear()
