from __future__ import annotations

import pytest

from megatron_brorl.rewards.final_answer import disagreement, final_answer, places, same_text


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (r"\boxed{\boxed{5}}", [r"\boxed{5}"]),
        (r"\boxed{\frac{1}{2}} \fbox{2}", [r"\frac{1}{2}", "2"]),
        (r"\boxed{1 and \boxed{2}", ["2"]),  # the first is never closed
        (r"\boxed{5", []),
        (r"\boxed{\{1, 2\}}", [r"\{1, 2\}"]),
        ("<answer> 5 </answer>", ["5"]),
        (r"<answer>It is \boxed{5}.</answer>", ["5"]),
        ("x\n#### 1,234", ["1,234"]),
        ("x #### -3", ["-3"]),
        ("x\n#### **42** apples", ["42 apples"]),
        ("#### 42 (apples)", ["42"]),
        ("#### 42, because 6 * 7 = 42", ["42"]),
        ("#### 42 or 43", ["42 or 43"]),
        ("#### 42, not", ["42, not"]),
        ("#### (C)", ["(C)"]),
        ("#### **2. Next**", []),
        ("#### 1. Set up\n#### Step two", []),
        ("The answer is 42. I am sure.", ["42"]),
        ("**Answer:** 42", ["42"]),
        ("**Final Answer**: The final answer is $42$. I hope it is correct.", ["$42$"]),
        ("The answer to the question is 3.5 m.", ["3.5 m"]),
        ("The answer is\n\\[\n42\n\\]", ["42"]),
        ("The answer is 41, no, the answer is 42.", ["41, no, the", "42"]),
        ("The unanswered question is 42", []),
        ("<think>The answer is 41.</think>The answer is 42.", ["42"]),
        ("", []),
    ],
)
def test_places(response, said):
    assert places(response) == said


def test_boxes_go_before_sentences_and_equal_ones_are_one():
    assert final_answer(r"The answer is 1. \boxed{2}") == "2"
    assert final_answer(r"\boxed{x + 1} \boxed{x+1}") == "x+1"
    assert final_answer(r"\boxed{1} \boxed{2} \boxed{2}") is None


def test_a_form_without_an_answer_of_the_kind_that_is_looked_for_hides_no_other():
    response = r"<answer>x</answer> \boxed{y} #### 42 The answer is z. The answer is 7."
    assert places(response, str.isdigit) == ["7"]
    assert places(response, lambda text: text == "y") == ["y"]
    assert places(response, lambda text: False) == places(response) == ["x"]
    assert places(r"<answer>\boxed{x} Answer: 7</answer>", str.isdigit) == ["7"]


def test_many_spellings_are_not_compared():
    spellings = [" " * i + "5" + " " * i + "." for i in range(50)]
    assert disagreement(spellings[:5], same_text) is None
    assert disagreement(spellings, same_text)
