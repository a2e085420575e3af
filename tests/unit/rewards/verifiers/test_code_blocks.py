"""The selection of the program among the blocks of a response: the one that a human reader would take from it.

SCRIPTS answer tasks with standard input and output. FUNCTIONS answer tasks that call a function or a method. None means
that the response does not contain a program.
"""

from __future__ import annotations

import pytest

from megatron_brorl.rewards.extract import extract
from megatron_brorl.rewards.verifiers import code, code_blocks


def fence(content: str, language: str = "python", mark: str = "```") -> str:
    """Return a closed block."""
    return f"{mark}{language}\n{content}\n{mark}\n"


# Programs of the responses below. MAIN and SOLVE print twice the number that they read. WRONG prints 1 more.
MAIN = "n = int(input())\nprint(n * 2)"
SOLVE = (
    "import sys\n\ndef solve():\n    n = int(sys.stdin.readline())\n    print(2 * n)\n\n"
    "if __name__ == '__main__':\n    solve()"
)
WRONG = "n = int(input())\nprint(n + n + 1)"
QUOTES = 'def doc():\n    """Example:\n\n```python\n>>> doc()\n```\n    """\n\nn = int(input())\nprint(n * 2)'
BARE_QUOTES = "TEXT = '''\n```\n{}\n```\n'''\nprint(TEXT.format(input()))"
GIVEN = "import io, sys\nsys.stdin = io.StringIO('5')\nn = int(input())\nprint(2 * n)"

# name -> (response, program)
SCRIPTS = {
    "one block": (f"So:\n{fence(MAIN)}Done.", MAIN),
    "pandoc's form": (fence(MAIN, "{.python .numberLines}"), MAIN),
    "Windows lines": (fence(MAIN).replace("\n", "\r\n"), MAIN.replace("\n", "\r\n")),
    # Blocks after the program.
    "```bash": (fence(MAIN) + "Run\n" + fence("echo 5 | python main.py", "bash"), MAIN),
    "an input that is Python": (fence(MAIN) + "Input:\n" + fence("5", ""), MAIN),
    "an output marked as Python": (fence(MAIN) + "Output:\n" + fence("10"), MAIN),
    "solve()": (fence(SOLVE) + "Call it:\n" + fence("solve()"), SOLVE),
    "a copy with a given standard input": (fence(SOLVE) + fence(GIVEN), SOLVE),
    "a part of the program": (fence(SOLVE) + "The key line:\n" + fence("print(2 * n)"), SOLVE),
    # Blocks before the program.
    "a helper before": (fence("def double(n):\n    return 2 * n") + fence(MAIN), MAIN),
    # Several programs.
    "a revised one": (f"{fence(WRONG)}Wait, that is off by one.\n{fence(MAIN)}", MAIN),
    "a second one that is wrong": (fence(MAIN) + "Or:\n" + fence(WRONG), WRONG),
    "a revised one that does not compile": (fence(MAIN) + fence("n = int(input()\nprint(n * 2)"), MAIN),
    # Fences.
    "three backticks in four": (fence(BARE_QUOTES, "python", "````"), BARE_QUOTES),
    "a fence in a docstring, then an output": (fence(QUOTES) + "Output:\n" + fence("5", ""), QUOTES),
    "bare fences in a string": (fence(BARE_QUOTES), BARE_QUOTES),
    "text after the closing fence, then an output": (f"```python\n{MAIN}\n``` It prints\n```output\n5\n```\n", MAIN),
    "an open program, then a block": (f"```python\n{WRONG}\n{fence(MAIN)}", MAIN),
    "an open program at the end": (fence(MAIN) + f"Better:\n```python\n{WRONG}", MAIN),
    "only an open fence": (f"```python\n{MAIN}", None),
    # Thoughts.
    "a block in the thought": (f"<think>{fence(WRONG)}</think>\n{fence(MAIN)}", MAIN),
    "only in the thought": (f"<think>\n{fence(MAIN)}</think>\nI give up.", None),
    "an open fence in the thought": (f"<think>\n```python\n{WRONG}\n</think>\n{fence(MAIN)}{fence('5', '')}", MAIN),
    "a thought that does not end": (f"<think>\n{fence(MAIN)}", None),
    "only a block of another language": (fence("echo 10", "bash"), None),
}

ADD = "def add(a, b):\n    return a + b"
SUBTRACT = "def add(a, b):\n    return a - b"
METHOD = "class Solution:\n    def add(self, a, b):\n        return a + b"
GCD = "from math import gcd\nclass Solution:\n    def gcd(self, a): return gcd(a, 6)"
INHERITS = "class A:\n    add = int.__add__\nclass Solution(A): pass"
LAMBDA = "add = lambda a, b: a + b"

# name -> (response, function, program)
FUNCTIONS = {
    "a usage that is a program": (fence(ADD) + fence("a, b = map(int, input().split())\nprint(a + b)"), "add", ADD),
    "a test's function": (fence(ADD) + fence("def test_add():\n    assert add(1, 2) == 3\n\ntest_add()"), "add", ADD),
    "a local of that name": (fence(ADD) + fence("def f():\n    add = 1\n    return add\nprint(f())"), "add", ADD),
    "a method of that name": (fence(ADD) + fence(METHOD), "add", ADD),
    "a revised one, then a call": (fence(SUBTRACT) + fence(ADD) + fence("print(add(1, 2))"), "add", ADD),
    "a second one that is wrong": (fence(ADD) + "Or:\n" + fence(SUBTRACT), "add", SUBTRACT),
    "a lambda": (fence(SUBTRACT) + fence(LAMBDA) + fence("add(1, 2)"), "add", LAMBDA),
    "only an import": (fence("from math import gcd") + fence("print(gcd(4, 6))"), "gcd", "from math import gcd"),
    "a method": (fence(METHOD) + fence("print(Solution().add(1, 2))"), "Solution.add", METHOD),
    "a class as on LeetCode": (fence(METHOD) + fence("print(Solution().add(1, 2))"), "add", METHOD),
    "a class whose method uses an import": (fence(GCD) + fence("from math import gcd"), "gcd", GCD),
    "a class that inherits": (fence(INHERITS) + fence("add(1, 2)"), "add", INHERITS),
}


def chosen(response: str, function: str | None = None, has_input: bool = True) -> str | None:
    """Return the program that would run."""
    answer = extract(response, code.find, max_chars=1 << 16).answer
    return None if answer is None else code_blocks.program(answer, function, has_input)


SCRIPT_CASES = [(response, None, program) for response, program in SCRIPTS.values()]


@pytest.mark.parametrize(
    ("response", "function", "expected"), [*SCRIPT_CASES, *FUNCTIONS.values()], ids=[*SCRIPTS, *FUNCTIONS]
)
def test_program_is_the_one_that_a_reader_would_choose(response, function, expected):
    program = chosen(response, function)
    assert (program and program.strip()) == (expected and expected.strip())


@pytest.mark.parametrize(
    "program",
    [
        "print(2 * int(input()))",
        "import sys\nprint(2 * int(sys.stdin.readline()))",
        "import io, os, sys\nsys.stdin = io.BytesIO(os.read(0, 10 ** 6))\nprint(2 * int(sys.stdin.readline()))",
        "print(2 * int(open('/dev/stdin').read()))",
        "import os\nos.write(1, str(2 * int(os.read(0, 99))).encode())",
        "from fileinput import input\nfor line in input():\n    print(2 * int(line))",
        "n, = map(int, open(0))\nprint(2 * n)",
        "def f():\n    global n\n    n = 2 * int(input())\n    print(n)\nf()\nprint(__name__, end='')",
    ],
)
def test_program_is_recognised_by_any_way_to_read_and_print(program):
    """The program wins against an earlier one that reads, and against a later block that runs without input."""
    response = fence(WRONG) + fence(program) + "For example:\n" + fence("def f(input):\n    print(2 * input)\n\nf(5)")
    assert chosen(response) == program + "\n"


def test_last_program_that_prints_counts_without_input():
    response = fence(MAIN) + fence("print(42)") + fence("42", "")
    assert chosen(response, has_input=False) == "print(42)\n"
    assert chosen(response, has_input=True) == MAIN + "\n"


@pytest.mark.parametrize("prelude", ["from math import *", "from math import gcd, pi", "pi, gcd = 3, max"])
def test_names_of_the_prelude_count_as_defined(prelude):
    blocks = fence("print(1)") + fence("print(gcd(4, 6), pi)") + fence("print(solve(1))")
    assert code_blocks.program(blocks, None, has_input=True, prelude=prelude) == "print(gcd(4, 6), pi)\n"
    assert code_blocks.program(blocks, function=None, has_input=True) == "print(1)\n"


def test_text_without_blocks_is_a_program():
    """A text without fences is a reference, or the part of a response that reward.extract selects."""
    assert code_blocks.program(MAIN, function=None, has_input=True) == MAIN
    assert code_blocks.program(QUOTES, function=None, has_input=True) == QUOTES
    assert code_blocks.program(f"So:\n{fence(QUOTES)}", function=None, has_input=True) == QUOTES + "\n"
    assert code_blocks.program("", function=None, has_input=True) == ""


@pytest.mark.parametrize(
    "hostile",
    [
        "```\n" * 16_000,
        '```python\n"""x\n```\n' * 3_000,
        "".join("`" * n + "\n" for n in range(300, 3, -1)) + "~~~\n" * 5_000,
        "```py\n" + "-" * 60_000 + "1\n```\n```\n```\n",
        "```py\n" + "(" * 60_000 + "\n```\n```\n```\n",
        "```py\nx" + ".a" * 30_000 + "\n```\n```\n```\n",
        "```py\n\0\n```\n```\n\ud800\n```\n",
    ],
)
def test_hostile_responses_raise_nothing(hostile):
    for function in (None, "add", "Solution.add"):
        chosen(hostile, function)
