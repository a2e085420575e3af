"""Every mapping on rows in the columns of its published set; the content is invented."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron_brorl.data.sets.form import Task, Unusable
from megatron_brorl.data.sets.own import Custom
from megatron_brorl.data.sets.table import INSTRUCTIONS, SETS, without_instruction
from megatron_brorl.errors import UserError

DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\nRemember to put your answer on its "
    'own line after "Answer:".'
)
EURUS = "{}\n\nWrite Python code to solve the problem. Present the code in \n```python\nYour code\n```\nat the end."
SYSTEM = {"role": "system", "content": "Think in steps."}


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def eurus(tests: Any, ability: str = "code", problem: str = "Add the numbers.") -> dict[str, Any]:
    return {
        "data_source": "taco",
        "prompt": [SYSTEM, user(EURUS.format(problem))],
        "ability": ability,
        "reward_model": {"ground_truth": tests if isinstance(tests, str) else json.dumps(tests), "style": "rule"},
        "extra_info": {"index": 0, "split": "dummy"},
    }


def dapo(problem: str, answer: str) -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [user(DAPO.format(problem))],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b"},
    }


HUMANEVAL = {
    "task_id": "HumanEval/999",
    "prompt": '\ndef twice(x):\n    """Two times x."""\n',
    "canonical_solution": "    return 2 * x\n",
    "test": (
        "\n\nMETADATA = {'author': 'x'}\n\n\ndef check(candidate):\n    '''Some.'''\n"
        "    assert candidate(1) == 2, 'one'\n    assert abs(candidate(0.5) - 1) < 1e-6\n"
        "    # sums\n    assert candidate(candidate(1)) == twice(2)\n    assert True\n"
    ),
    "entry_point": "twice",
}
MBPP = {
    "task_id": 7,
    "text": "Write a function to take the larger of two numbers.",
    "code": "def helper(a):\r\n  return a\r\ndef larger(a, b):\r\n  return max(helper(a), b)",
    "test_list": ["assert larger(1, 2) == 2", "assert set(larger([3], [2])) == {3}"],
    "test_setup_code": "",
    "challenge_test_list": [],
}
IFEVAL = {
    "key": 12,
    "prompt": "Write a poem without commas in at least 20 words.",
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
    "kwargs": [{"num_words": None, "relation": None}, {"num_words": 20, "relation": "at least"}],
}
LOOP = "def check(candidate):\n    for i in range(9):\n        assert candidate(i) == 2 * i"
MBPP_SHOWN = (
    f"{MBPP['text']}\n\nYour code should pass these tests:\nassert larger(1, 2) == 2\n"
    "assert set(larger([3], [2])) == {3}"
)

GOOD: list[tuple[str, dict[str, Any], Task]] = [
    ("gsm8k", {"question": "Ann has 3 nuts.", "answer": "3 <<3=3>>\n#### 3"}, Task("Ann has 3 nuts.", "3", "math")),
    ("gsm8k", {"question": "Bo?", "answer": "####  -1,200 "}, Task("Bo?", "-1200", "math")),
    (
        "math500",
        {
            "problem": "Find $x$.",
            "solution": "It is $\\frac{1}{2}$.",
            "answer": "\\frac{1}{2}",
            "subject": "Algebra",
            "level": 2,
            "unique_id": "test/algebra/1.json",
        },
        Task("Find $x$.", "\\frac{1}{2}", "math", id="test/algebra/1.json"),
    ),
    ("aime", {"id": 60, "problem": "Find n.", "answer": "033", "year": "2024"}, Task("Find n.", "33", "math")),
    ("aime", {"ID": "2024-I-1", "Problem": "Find n.", "Answer": 204}, Task("Find n.", "204", "math")),
    ("aime", {"question": "Find n.", "answer": "0"}, Task("Find n.", "0", "math")),
    (
        "deepscaler",
        {"problem": "Find $y$. ", "answer": " 3\\pi", "solution": ""},
        Task("Find $y$.", "3\\pi", "math"),
    ),
    ("dapo", dapo("Let $a=1$.\n\nFind $a$.", "1"), Task("Let $a=1$.\n\nFind $a$.", "1", "math")),
    (
        "dapo",
        {"prompt": "Find $b$.", "reward_model": {"ground_truth": "2"}, "source_prompt": []},
        Task("Find $b$.", "2", "math"),
    ),
    (
        "eurus",
        eurus({"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", "7"]}),
        Task(
            "Add the numbers.",
            None,
            "code",
            {"tests": [{"input": "1 2\n", "output": "3\n"}, {"input": "3\n4", "output": "7"}]},
        ),
    ),
    (
        "eurus",
        eurus({"fn_name": "add", "inputs": ["1\n[2]", '"x"'], "outputs": ["[1, 2]", "null"]}),
        Task(
            "Add the numbers.",
            None,
            "code",
            {
                "function": "add",
                "tests": [{"args": [1, [2]], "expected": [1, 2]}, {"args": ["x"], "expected": None}],
            },
        ),
    ),
    (
        "eurus",  # as APPS writes calls: every expected value in a list of one
        eurus({"fn_name": "add", "inputs": [[1, 2], [[3], 4]], "outputs": [[3], [[7]]]}),
        Task(
            "Add the numbers.",
            None,
            "code",
            {"function": "add", "tests": [{"args": [1, 2], "expected": 3}, {"args": [[3], 4], "expected": [7]}]},
        ),
    ),
    (
        "humaneval",
        HUMANEVAL,
        Task(
            'def twice(x):\n    """Two times x."""',
            None,
            "code",
            {
                "function": "twice",
                "asserts": [
                    "assert twice(1) == 2",
                    "assert abs(twice(0.5) - 1) < 1e-06",
                    "assert twice(twice(1)) == twice(2)",
                ],
            },
            "HumanEval/999",
        ),
    ),
    ("mbpp", MBPP, Task(MBPP_SHOWN, None, "code", {"function": "larger", "asserts": MBPP["test_list"]}, "7")),
    (
        "mbpp",  # the sanitized set
        {"source_file": "a.ipynb", "prompt": MBPP["text"], "test_imports": [], **MBPP, "text": None},
        Task(MBPP_SHOWN, None, "code", {"function": "larger", "asserts": MBPP["test_list"]}, "7"),
    ),
    (
        "humaneval",
        {**HUMANEVAL, "test": f"\n{LOOP}\n\n"},
        Task(
            'def twice(x):\n    """Two times x."""',
            None,
            "code",
            {"function": "twice", "asserts": [f"{LOOP}\n\ncheck(twice)"]},
            "HumanEval/999",
        ),
    ),
    (
        "mbpp",
        {**MBPP, "test_imports": ["import math"], "test_setup_code": "x = 1\n"},
        Task(
            MBPP_SHOWN,
            None,
            "code",
            {"function": "larger", "asserts": MBPP["test_list"], "setup": "import math\nx = 1"},
            "7",
        ),
    ),
    (
        "scp116k",
        {"domain": "Physics", "problem": "Find the force.", "extract_solution": "12 N"},
        Task("Find the force.", "12 N", "short_answer"),
    ),
    (
        "ifeval",
        IFEVAL,
        Task(
            "Write a poem without commas in at least 20 words.",
            None,
            "ifeval",
            {
                "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
                "kwargs": [{}, {"num_words": 20, "relation": "at least"}],
            },
            "12",
        ),
    ),
]


@pytest.mark.parametrize(("name", "raw", "task"), GOOD)
def test_a_row_becomes_a_task(name: str, raw: dict[str, Any], task: Task) -> None:
    assert SETS[name].convert(raw, "f:1") == task


def gpqa(number: int, **changes: Any) -> dict[str, Any]:
    wrong = {f"Incorrect Answer {i}": f" wrong {i}" for i in (1, 2, 3)}
    return {"Question": f"Question {number}?", "Correct Answer": "right\n", **wrong, "Record ID": "rec1", **changes}


def test_choices_stand_in_an_order_of_their_own_and_the_letter_names_the_right_one() -> None:
    letters = []
    for number in range(400):
        task = SETS["gpqa"].convert(gpqa(number), "f:1")
        choices = task.metadata["choices"]
        assert sorted(choices) == ["right", "wrong 1", "wrong 2", "wrong 3"]
        assert task.answer is not None
        assert choices["ABCD".index(task.answer)] == "right"
        shown = "".join(f"\n{letter}) {choice}" for letter, choice in zip("ABCD", choices, strict=True))
        assert task.problem == f"Question {number}?\n{shown}"
        letters.append(task.answer)
    # A fair coin of four sides is within 4.4 standard deviations of 100 in all but one of 10,000 tries.
    assert all(abs(letters.count(letter) - 100) < 38 for letter in "ABCD")
    assert SETS["gpqa"].convert(gpqa(5), "f:1") == SETS["gpqa"].convert(gpqa(5), "g:9")
    assert task.id == "rec1"


NO_TASK: list[tuple[str, dict[str, Any], str]] = [
    ("deepscaler", {"problem": "Find $y$.", "answer": ""}, "no answer"),
    ("dapo", dapo(" ", "1"), "no problem"),
    ("eurus", eurus("x", "math"), "not a row of code"),
    ("eurus", eurus("{"), "tests that are not JSON"),
    ("eurus", eurus([1]), "tests without inputs or outputs"),
    ("eurus", eurus({"inputs": ["1"], "outputs": []}), "not as many outputs as inputs"),
    ("eurus", eurus({"inputs": [], "outputs": []}), "no tests"),
    ("eurus", eurus({"inputs": [1], "outputs": ["1"]}), "an input or output that is not text"),
    ("eurus", eurus({"fn_name": "f", "inputs": ["x y"], "outputs": ["1"]}), "tests that are not JSON"),
    ("eurus", eurus({"fn_name": "f", "inputs": [3], "outputs": [1]}), "arguments that are no list"),
    ("humaneval", {**HUMANEVAL, "test": "x = 1"}, "a test without check"),
    ("humaneval", {**HUMANEVAL, "test": "def check(candidate):\n    assert True\n"}, "a test without asserts"),
    ("mbpp", {**MBPP, "test_list": ["assert other(1)"]}, "call none of the solution's functions"),
    ("mbpp", {**MBPP, "code": "print 1"}, "no Python 3"),
    ("scp116k", {"problem": "Why?", "solution": "Because " * 30}, "answer longer than 120 characters"),
    ("scp116k", {"problem": "Why?", "answer": " "}, "no answer"),
    ("gpqa", gpqa(1, **{"Incorrect Answer 2": "right"}), "two choices are the same"),
]


@pytest.mark.parametrize(("name", "raw", "reason"), NO_TASK)
def test_a_row_that_is_no_task_says_why(name: str, raw: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unusable) as e:
        SETS[name].convert(raw, "f:1")
    assert reason in str(e.value)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("gsm8k", {"problem": "x"}, "there is no column 'answer', only 'problem'; is it another set, or another version?"),
    ("gsm8k", {"question": "x", "answer": "3"}, "the answer has no line '#### ...'"),
    ("gsm8k", {"question": 3, "answer": "#### 3"}, "column 'question' must be text, not int"),
    ("aime", {"problem": "x", "answer": "1/2"}, "the answer '1/2' is no whole number from 0 to 999"),
    ("aime", {"problem": "x", "answer": 1000}, "the answer '1000' is no whole number from 0 to 999"),
    ("dapo", {"prompt": "x", "reward_model": "1"}, "column 'reward_model' must be an object with 'ground_truth'"),
    ("dapo", {"prompt": [SYSTEM]}, "column 'prompt' has no message of the role 'user'"),
    ("eurus", {"ability": "code", "prompt": None}, "column 'prompt' must be a list, not NoneType"),
    ("ifeval", {**IFEVAL, "kwargs": [{}]}, "kwargs must have an object for each of the 2 instructions"),
    ("gpqa", {"question": "x"}, "there is no column 'Question'"),
    ("rows", {"question": "x"}, "unknown key 'question' in a row"),
    ("rows", {"prompt": "x", "answer": 3}, "answer must be text or null"),
]


@pytest.mark.parametrize(("name", "raw", "message"), WRONG)
def test_another_layout_is_an_error_with_its_row(name: str, raw: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as e:
        SETS[name].convert(raw, "f.jsonl:3")
    assert str(e.value).startswith("f.jsonl:3: ")
    assert message in str(e.value)
    assert "\n" not in str(e.value)


def test_columns_named_by_hand() -> None:
    raw = {"q": " Two and two? ", "worked": "2 + 2 = 4, so the answer is 4.", "n": 4.0}
    assert Custom("q", "worked", r"answer is (\d+)")(raw, "f:1") == Task("Two and two?", "4", "")
    assert Custom("q", "worked", r"\d")(raw, "f:1").answer == "4"  # the last match
    assert Custom("q", "n", "")(raw, "f:1").answer == "4"
    assert Custom("q", "", "")(raw, "f:1").answer is None
    with pytest.raises(Unusable, match="without a match"):
        Custom("q", "worked", r"(\d{5})")(raw, "f:1")
    with pytest.raises(UserError, match=r"f:1: there is no column 'question', only 'q', 'worked', 'n'"):
        Custom("question", "", "")(raw, "f:1")
    with pytest.raises(UserError, match="--answer-regex '\\(': not a regular expression"):
        Custom("q", "n", "(")


def test_instructions_come_off_again() -> None:
    for instruction in INSTRUCTIONS.values():
        assert without_instruction(f"Find x.\n\n{instruction}") == "Find x."
    assert without_instruction("Find x.\n\nNow.") == "Find x.\n\nNow."
