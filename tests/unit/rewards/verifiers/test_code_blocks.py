"""The selection of the program among the blocks of a response, with the responses of code_responses.py."""

from __future__ import annotations

import pytest
from code_responses import FIRST, FUNCTIONS, MAIN, QUOTES, SCRIPTS, fence

from megatron_brorl.rewards.extract import extract
from megatron_brorl.rewards.verifiers import code, code_blocks


def chosen(response: str, function: str | None = None, has_input: bool = True) -> str | None:
    """Return the program that would run."""
    answer = extract(response, code.find, 1 << 16).answer
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
    response = fence(FIRST) + fence(program) + "For example:\n" + fence("def f(input):\n    print(2 * input)\n\nf(5)")
    assert chosen(response) == program + "\n"


def test_last_program_that_prints_counts_without_input():
    response = fence(MAIN) + fence("print(42)") + fence("42", "")
    assert chosen(response, has_input=False) == "print(42)\n"
    assert chosen(response, has_input=True) == MAIN + "\n"


@pytest.mark.parametrize("prelude", ["from math import *", "from math import gcd, pi", "pi, gcd = 3, max"])
def test_names_of_the_prelude_count_as_defined(prelude):
    blocks = fence("print(1)") + fence("print(gcd(4, 6), pi)") + fence("print(solve(1))")
    assert code_blocks.program(blocks, None, True, prelude) == "print(gcd(4, 6), pi)\n"
    assert code_blocks.program(blocks, None, True) == "print(1)\n"


def test_text_without_blocks_is_a_program():
    """A text without fences is a reference, or the part of a response that reward.extract selects."""
    assert code_blocks.program(MAIN, None, True) == MAIN
    assert code_blocks.program(QUOTES, None, True) == QUOTES
    assert code_blocks.program(f"So:\n{fence(QUOTES)}", None, True) == QUOTES + "\n"
    assert code_blocks.program("", None, True) == ""


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
