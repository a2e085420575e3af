"""Test the conversion of rows of published sets. Their content is invented."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron_brorl.data.published_sets import INSTRUCTIONS, PRELUDE, SETS, Unusable, without_instruction
from megatron_brorl.errors import UserError

DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\nRemember to put your answer on its "
    'own line after "Answer:".'
)
EURUS = "{}\n\nWrite Python code to solve the problem. Present the code in \n```python\nYour code\n```\nat the end."
SYSTEM = {"role": "system", "content": "Think in steps."}


def eurus(tests: Any, ability: str = "code") -> dict[str, Any]:
    return {
        "prompt": [SYSTEM, {"role": "user", "content": EURUS.format("Add the numbers.")}],
        "ability": ability,
        "reward_model": {"ground_truth": tests if isinstance(tests, str) else json.dumps(tests), "style": "rule"},
    }


def dapo(problem: str, answer: str) -> dict[str, Any]:
    prompt = [{"role": "user", "content": DAPO.format(problem)}]
    return {"prompt": prompt, "ability": "MATH", "reward_model": {"ground_truth": answer, "style": "rule"}}


def gpqa(number: int, **changes: Any) -> dict[str, Any]:
    wrong = {f"Incorrect Answer {i}": f" wrong {i}" for i in (1, 2, 3)}
    return {"Question": f"Question {number}?", "Correct Answer": "right\n", **wrong, "Record ID": "rec1", **changes}


HUMANEVAL = {
    "task_id": "HumanEval/999",
    "prompt": '\ndef twice(x):\n    """Two times x."""\n',
    "test": "\n\ndef check(candidate):\n    assert candidate(1) == 2, 'one'\n",
    "entry_point": "twice",
}
MBPP = {
    "task_id": 7,
    "text": "Take the larger of two numbers.",
    "code": "def helper(a):\r\n  return a\r\ndef larger(a, b):\r\n  return max(helper(a), b)",
    "test_list": ["assert set(larger([3], [2])) == {3}"],
    "test_setup_code": "x = 1\n",
}
RULES = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"num_words": None}]}
IFEVAL = {"key": 12, "prompt": "Write without commas.", **RULES}
MATH: list[tuple[str, dict[str, Any], str, str]] = [
    ("gsm8k", {"question": "Bo?", "answer": "3 <<3=3>>\n####  -1,200 "}, "Bo?", "-1,200"),
    ("math500", {"problem": "Find $x$.", "answer": "\\frac{1}{2}", "unique_id": "a.json"}, "Find $x$.", "\\frac{1}{2}"),
    ("aime", {"id": 60, "problem": "Find n.", "answer": "033"}, "Find n.", "033"),
    ("deepscaler", {"problem": "Find $y$.", "answer": "3\\pi", "solution": ""}, "Find $y$.", "3\\pi"),
    ("dapo", dapo("Let $a=1$.\n\nFind $a$.", "1"), "Let $a=1$.\n\nFind $a$.", "1"),
    ("dapo", {"prompt": "Find $b$.", "reward_model": {"ground_truth": "2"}}, "Find $b$.", "2"),
    ("scp116k", {"problem": "Find the force.", "extract_solution": "12 N"}, "Find the force.", "12 N"),
]
CALLS = [{"args": [1, [2]], "expected": [1, 2]}, {"args": ["x\u2028"], "expected": None}]
LINES = [{"input": "1 2\n", "output": "3\n"}, {"input": "3\n4", "output": "7"}]
ADD = {"function": "add", "tests": CALLS, "prelude": PRELUDE}
CODE = "from typing import List\n\ndef twice_all(): pass"
TWICE = {"function": "twice", "asserts": [f"{HUMANEVAL['test'].strip()}\n\ncheck(twice)"]}
METADATA: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("eurus", eurus({"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", "7"]}), {"tests": LINES, "prelude": PRELUDE}),
    ("eurus", eurus({"fn_name": "add", "inputs": ["1\n[2]\n", '"x\u2028"'], "outputs": ["[1, 2]", "null"]}), ADD),
    # As in APPS.
    ("eurus", eurus({"fn_name": "add", "inputs": [[1, [2]], ["x\u2028"]], "outputs": [[[1, 2]], [None]]}), ADD),
    ("humaneval", HUMANEVAL, TWICE),
    (
        "humaneval",
        {**HUMANEVAL, "prompt": f"{CODE}\n\n{HUMANEVAL['prompt']}"},
        TWICE | {"prelude": CODE, "setup": CODE},
    ),
    ("mbpp", MBPP, {"function": "larger", "asserts": MBPP["test_list"], "setup": "x = 1"}),
    ("ifeval", IFEVAL, RULES),
]


@pytest.mark.parametrize(("name", "raw", "problem", "answer"), MATH)
def test_problems_and_answers(name, raw, problem, answer):
    row = SETS[name].row(raw, "f:1")
    assert (row["prompt"], row["answer"], row["verifier"]) == (problem, answer, SETS[name].verifier)


@pytest.mark.parametrize(("name", "raw", "metadata"), METADATA)
def test_metadata_of_verifiers(name, raw, metadata):
    row = SETS[name].row(raw, "f:1")
    assert (row.get("answer"), row["metadata"]) == (None, metadata)
    assert "```" not in row["prompt"]


def test_mbpp_shows_its_tests_in_both_versions():
    shown = f"{MBPP['text']}\n\nYour code should pass these tests:\n{MBPP['test_list'][0]}"
    assert SETS["mbpp"].row(MBPP, "f:1")["prompt"] == shown
    assert SETS["mbpp"].row({**MBPP, "text": None, "prompt": MBPP["text"]}, "f:1")["prompt"] == shown


def test_choices_have_a_fixed_order_and_the_letter_of_the_correct_one():
    letters = []
    for number in range(400):
        row = SETS["gpqa"].row(gpqa(number), "f:1")
        choices = row["metadata"]["choices"]
        assert sorted(choices) == ["right", "wrong 1", "wrong 2", "wrong 3"]
        assert choices["ABCD".index(row["answer"])] == "right"
        shown = "".join(f"\n{letter}) {choice}" for letter, choice in zip("ABCD", choices, strict=True))
        assert row["prompt"] == f"Question {number}?\n{shown}"
        letters.append(row["answer"])
    # 4.4 standard deviations around a quarter of 400.
    assert all(abs(letters.count(letter) - 100) < 38 for letter in "ABCD")


@pytest.mark.parametrize(
    ("name", "raw", "reason"),
    [
        ("eurus", eurus("x", "math"), "not a row of code"),
        ("eurus", eurus("{"), "tests that are not JSON"),
        ("eurus", eurus({"inputs": ["1"], "outputs": []}), "not as many outputs as inputs"),
        ("mbpp", {**MBPP, "test_list": ["assert other(1)"]}, "call none of the solution's functions"),
        ("scp116k", {"problem": "Why?", "solution": "Because " * 30}, "answer longer than 120 characters"),
        ("gpqa", gpqa(1, **{"Incorrect Answer 2": "right"}), "two choices are the same"),
    ],
)
def test_unusable_rows_have_a_reason(name, raw, reason):
    with pytest.raises(Unusable, match=reason):
        SETS[name].row(raw, "f:1")


@pytest.mark.parametrize(
    ("name", "raw", "named"),
    [
        ("gsm8k", {"problem": "x"}, "only problem"),
        ("eurus", eurus([1]), "PRIME-RL/Eurus-2-RL-Data"),
        ("humaneval", {"prompt": "x", "task_id": "1"}, "openai/openai_humaneval: KeyError: 'entry_point'"),
    ],
)
def test_rows_of_another_set_are_named(name, raw, named):
    with pytest.raises(UserError, match=rf"^f\.jsonl:3: .*{named}"):
        SETS[name].row(raw, "f.jsonl:3")


def test_instructions_are_removed_again():
    for instruction in INSTRUCTIONS.values():
        assert without_instruction(f"Find x.\n\n{instruction}") == "Find x."
    assert without_instruction("Find x.\n\nNow.") == "Find x.\n\nNow."
