from __future__ import annotations

import pytest

from megatron_brorl.rewards.extract import FINDERS, extract


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
    assert extract(text, FINDERS[how], 100).answer == answer  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "how", "most", "answer"),
    [
        ("x" * 10, "full", 10, "x" * 10),
        ("x" * 11, "full", 10, None),
        (" " * 50 + "x" * 10, "full", 10, "x" * 10),
        ("thoughts " * 100 + "<answer>7</answer>", "answer_tag", 1, "7"),
        ("<answer>77</answer>", "answer_tag", 1, None),
    ],
)
def test_a_long_answer_is_none(text: str, how: str, most: int, answer: str | None) -> None:
    found = extract(text, FINDERS[how], most)  # type: ignore[index]
    assert found == (answer, "" if answer else f"the answer has more than {most} characters")


def test_a_hundred_megabytes_are_not_looked_at() -> None:
    text = r"\boxed{" + "{" * 100_000_000

    def never(text: str) -> str | None:
        raise AssertionError("was looked at")

    assert extract(text, never, 10**9) == (None, "the response has more than 1048576 characters")
    assert extract(text[: 1 << 20], FINDERS["boxed"], 10) == (None, "no answer in the response")
