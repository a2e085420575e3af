from __future__ import annotations

import pytest

from megatron_brorl.rewards.extract import FINDERS, extract, final_answer, given_answer, places, same_text


@pytest.mark.parametrize(
    ("how", "text", "answer"),
    [
        ("full", "  42 \n", "42"),
        ("answer_tag", "so <answer> 42 </answer> it is", "42"),
        ("answer_tag", "<answer>1</answer> no, <answer>2</answer>", "2"),
        ("answer_tag", "<answer>1</answer> no, <answer>2", "1"),
        ("answer_tag", "<answer>line\nline</answer>", "line\nline"),
        ("answer_tag", "<answer></answer>", ""),
        ("answer_tag", "42", None),
        ("answer_tag", "</answer>42<answer>", None),
        ("boxed", r"thus \boxed{42}.", "42"),
        ("boxed", r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("boxed", r"\boxed{ {a}{b} }", "{a}{b}"),
        ("boxed", r"\boxed{1} or \boxed{2}", None),
        ("boxed", r"\boxed{\boxed{1}}", None),
        ("boxed", r"\boxed{42", None),
        ("boxed", "\\boxed{42\\", None),
        ("boxed", "42", None),
    ],
)
def test_extract(how, text, answer):
    assert extract(text, FINDERS[how], max_chars=100).answer == answer


def test_long_answers_are_refused():
    assert extract(" " * 50 + "x" * 10, FINDERS["full"], max_chars=10) == ("x" * 10, "")
    assert extract("x" * 11, FINDERS["full"], max_chars=10) == (None, "the answer has more than 10 characters")
    assert extract("thoughts " * 100 + "<answer>7</answer>", FINDERS["answer_tag"], max_chars=1).answer == "7"


def test_long_responses_are_not_searched():
    text = r"\boxed{" + "{" * 100_000_000

    def never(text: str) -> str | None:
        raise AssertionError("was searched")

    assert extract(text, never, max_chars=10**9) == (None, "the response has more than 1048576 characters")
    assert extract(text[: 1 << 20], FINDERS["boxed"], max_chars=10) == (None, "no answer in the response")


@pytest.mark.parametrize(
    ("response", "answers"),
    [
        (r"\boxed{\boxed{5}}", [r"\boxed{5}"]),
        (r"\boxed{\frac{1}{2}} \fbox{2}", [r"\frac{1}{2}", "2"]),
        (r"\boxed{1 and \boxed{2}", ["2"]),  # the first is never closed
        ("<answer> 5 </answer>", ["5"]),
        (r"<answer>It is \boxed{5}.</answer>", ["5"]),
        ("#### (C)", ["(C)"]),
        ("#### 1. Set up\n#### Step two", []),
        ("The answer is 42. I am sure.", ["42"]),
        ("**Answer:** 42", ["42"]),
        ("**Final Answer**: The final answer is $42$. I hope it is correct.", ["$42$"]),
        ("The answer is\n\\[\n42\n\\]", ["42"]),
        ("The answer is 41, no, the answer is 42.", ["41, no, the", "42"]),
        ("The unanswered question is 42", []),
        ("<think>The answer is 41.</think>The answer is 42.", ["42"]),
    ],
)
def test_places(response, answers):
    """Check the answers in the first form that occurs. answer_pairs.tsv has more answers after "####"."""
    assert places(response) == answers


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"The answer is 1. \boxed{2}", "2"),
        (r"\boxed{x + 1} \boxed{x+1}", "x+1"),
        (r"\boxed{1} \boxed{2} \boxed{2}", None),
        (" 12 ", "12"),
        ("twelve", None),
    ],
)
def test_final_answer_is_unique_or_bare(response, answer):
    assert final_answer(response, same_text, str.isdigit) == answer


def test_forms_without_a_possible_answer_are_skipped():
    response = r"<answer>x</answer> \boxed{y} #### 42 The answer is z. The answer is 7."
    assert places(response, str.isdigit) == ["7"]
    assert places(response, lambda text: text == "y") == ["y"]
    assert places(response, lambda text: False) == places(response) == ["x"]
    assert places(r"<answer>\boxed{x} Answer: 7</answer>", str.isdigit) == ["7"]


def test_many_spellings_are_not_compared():
    spellings = [rf"\boxed{{5{' ' * i}.}}" for i in range(50)]
    reasons = [given_answer(" ".join(spellings[:n]), same_text)[1] for n in (5, 50)]
    assert [bool(reason) for reason in reasons] == [False, True]  # 5 spellings of one answer are compared, 50 are not.
