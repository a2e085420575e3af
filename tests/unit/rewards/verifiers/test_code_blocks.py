"""Which block of a response is the program: those of code_responses.py, written by hand."""

from __future__ import annotations

from typing import Any

import pytest
from code_responses import ADD, FIRST, FUNCTIONS, MAIN, OLD, QUOTES, SCRIPTS, fence

from megatron_brorl.rewards.extract import extract
from megatron_brorl.rewards.sandbox import probe
from megatron_brorl.rewards.verifiers import code, code_blocks
from megatron_brorl.rewards.worker_pool import RewardPool, ScoreRequest
from megatron_brorl.types import Prompt


def chosen(response: str, function: str | None = None, has_input: bool = True) -> str | None:
    """The program that would run."""
    found = extract(response, code.find, 1 << 16).answer
    return None if found is None else code_blocks.program(found, function, has_input)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_program_of_a_task_with_standard_input(name: str) -> None:
    response, expected = SCRIPTS[name]
    found = chosen(response)
    assert (found and found.strip()) == (expected and expected.strip())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_program_of_a_task_with_a_function(name: str) -> None:
    response, function, expected = FUNCTIONS[name]
    found = chosen(response, function)
    assert (found and found.strip()) == (expected and expected.strip())


@pytest.mark.parametrize(
    "program",
    [
        "print(2 * int(input()))",
        "import sys\nprint(2 * int(sys.stdin.readline()))",
        "from sys import stdin, stdout\nstdout.write(str(2 * int(stdin.readline())))",
        "import sys\ninput = sys.stdin.readline\nprint(2 * int(input()))",
        "import sys\nsys.stdin = open(0)\nprint(2 * int(input()))",
        "import io, os, sys\nsys.stdin = io.BytesIO(os.read(0, 10 ** 6))\nprint(2 * int(sys.stdin.readline()))",
        "print(2 * int(open('/dev/stdin').read()))",
        "import os\nos.write(1, str(2 * int(os.read(0, 99))).encode())",
        "from fileinput import input\nfor line in input():\n    print(2 * int(line))",
        "n, = map(int, open(0))\nprint(2 * n)",
        "def main():\n    match input().split():\n        case [n, *rest]:\n            print(2 * int(n))\nmain()",
        "def f():\n    global n\n    n = 2 * int(input())\n    print(n)\nf()\nprint(__name__, end='')",
    ],
)
def test_a_program_is_known_by_reading_and_printing_however_it_does(program: str) -> None:
    """It is taken after one that reads, and before a block that runs but reads nothing."""
    response = fence(FIRST) + fence(program) + "For example:\n" + fence("def f(input):\n    print(2 * input)\n\nf(5)")
    assert chosen(response) == program + "\n"


def test_without_any_input_the_last_program_that_prints_counts() -> None:
    response = fence(MAIN) + fence("print(42)") + fence("42", "")
    assert chosen(response, has_input=False) == "print(42)\n"
    assert chosen(response, has_input=True) == MAIN + "\n"


def test_an_answer_that_is_no_block_is_a_program() -> None:
    """A row's own reference, or the part of a response that reward.extract names."""
    assert code_blocks.program(MAIN, None, True) == MAIN
    assert code_blocks.program(QUOTES, None, True) == QUOTES
    assert code_blocks.program(f"So:\n{fence(QUOTES)}", None, True) == QUOTES + "\n"
    assert code_blocks.program("", None, True) == ""


@pytest.mark.parametrize(
    "hostile",
    [
        "```\n" * 16_000,
        "```\n~~~\n" * 8_000,
        '```python\n"""x\n```\n' * 3_000,
        "".join("`" * n + "\n" for n in range(300, 3, -1)) + "~~~\n" * 5_000,
        "```py\n" + "-" * 60_000 + "1\n```\n```\n```\n",
        "```py\n" + "(" * 60_000 + "\n```\n```\n```\n",
        "```py\nx" + ".a" * 30_000 + "\n```\n```\n```\n",
        "```py\n\0\n```\n```\n\ud800\n```\n",
    ],
)
def test_a_hostile_response_raises_nothing(hostile: str) -> None:
    for function in (None, "add", "Solution.add"):
        chosen(hostile, function)


@pytest.mark.skipif(probe.problem() is not None, reason=str(probe.problem()))
def test_the_program_is_chosen_by_the_row_in_scoring_processes() -> None:
    """From responses to rewards in the three forms of a row."""
    rows: dict[str, dict[str, Any]] = {
        "script": {"tests": [{"input": "5\n", "output": "10\n"}, {"input": "7\n", "output": "14\n"}]},
        "function": {"function": "add", "tests": [{"args": [1, 4711], "expected": 4712}]},
        "asserts": {"function": "add", "asserts": ["assert add(1, 4711) == 4712"]},
    }
    thought = f"<think>\n```python\n{OLD}\n"
    cases = [
        ("script", fence(MAIN) + "Output:\n" + fence("10", ""), 1.0),
        ("script", fence(FIRST) + fence(MAIN) + fence("5", ""), 1.0),
        ("script", fence(MAIN) + fence(FIRST), 0.0),
        ("script", f"<think>{fence(MAIN)}</think>I give up.", 0.0),
        *((form, fence(ADD) + fence("print(add(1, 2))"), 1.0) for form in ("function", "asserts")),
        *((form, fence(OLD) + fence(ADD) + fence("3", ""), 1.0) for form in ("function", "asserts")),
        *((form, fence(ADD) + fence(OLD), 0.0) for form in ("function", "asserts")),
        *((form, f"{thought}</think>\n{fence(ADD)}", 1.0) for form in ("function", "asserts")),
        *((form, f"{thought}{fence(ADD)}</think>\nI give up.", 0.0) for form in ("function", "asserts")),
        *((form, fence("x = 1") + fence("y = 2", ""), 0.0) for form in rows),
        *((form, fence("ls", "bash") + fence("puts 1", ""), 0.0) for form in rows),
    ]
    prompts = {form: Prompt(form, "", (1,), None, "code", metadata) for form, metadata in rows.items()}
    requests = [ScoreRequest(prompts[form], *extract(text, code.find, 1 << 16)) for form, text, _ in cases]
    with RewardPool(1, 60.0) as pool:
        verdicts = pool.score(requests)
    assert [v.reward for v in verdicts] == [reward for _, _, reward in cases]
    assert {v.status for v in verdicts} == {"ok", "no_answer"}
