from __future__ import annotations

import pytest

from megatron_brorl.rewards.extract import extract


@pytest.mark.parametrize(
    ("how", "text", "answer"),
    [
        ("full", "  42 \n", "42"),
        ("full", "", ""),
        ("answer_tag", "so <answer> 42 </answer> it is", "42"),
        ("answer_tag", "<answer>1</answer> no, <answer>2</answer>", "2"),
        ("answer_tag", "<answer>1</answer> no, <answer>2", "1"),
        ("answer_tag", "<answer>a<answer>b</answer>", "b"),
        ("answer_tag", "<answer>line\nline</answer>", "line\nline"),
        ("answer_tag", "<answer></answer>", ""),
        ("answer_tag", "42", None),
        ("answer_tag", "</answer>42<answer>", None),
        ("answer_tag", "<answer>42", None),
        ("boxed", r"thus \boxed{42}.", "42"),
        ("boxed", r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("boxed", r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        ("boxed", r"\boxed{ {a}{b} }", "{a}{b}"),
        ("boxed", r"\boxed{1} or \boxed{2}", None),
        ("boxed", r"\boxed{\boxed{1}}", None),
        ("boxed", r"\boxed{42", None),
        ("boxed", r"\boxed{42\}", None),
        ("boxed", "\\boxed{42\\", None),
        ("boxed", "42", None),
    ],
)
def test_extract(how: str, text: str, answer: str | None) -> None:
    assert extract(text, how, 100) == answer  # type: ignore[arg-type]


def test_a_long_answer_is_none() -> None:
    assert extract("x" * 10, "full", 10) == "x" * 10
    assert extract("x" * 11, "full", 10) is None
    assert extract(" " * 50 + "x" * 10, "full", 10) == "x" * 10
    assert extract("thoughts " * 100 + "<answer>7</answer>", "answer_tag", 1) == "7"
    assert extract("<answer>77</answer>", "answer_tag", 1) is None
