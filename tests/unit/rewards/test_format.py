from __future__ import annotations

import pytest

from megatron_brorl.errors import UserError
from megatron_brorl.rewards.format import check_row, format_, skeleton
from megatron_brorl.rewards.verifier import Score, VerifierRow


def row(**metadata: object) -> VerifierRow:
    return VerifierRow(id="r", prompt="?", answer=None, metadata=metadata)


OUT = "tags out of order, empty, or text outside them"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("<think>a</think><answer>4</answer>", ""),
        ("<think> a < b </think>\n <answer>x <y> z</answer>\n", ""),
        ("<think>a <b>c</b></think><answer><b></answer>", ""),
        ("<think></think><answer>4</answer>", OUT),
        ("<think>a</think><answer> \n</answer>", OUT),
        ("Well: <think>a</think><answer>4</answer>", OUT),
        ("<think>a</think> so <answer>4</answer>", OUT),
        ("<think>a</think><answer>4</answer>!", OUT),
        ("<answer>4</answer><think>a</think>", OUT),
        ("<think>a<answer>4</answer></think>", OUT),
        ("<think>a</think><answer>4</answer><answer>5</answer>", "<answer> occurs 2 times, not once"),
        ("<think>a<answer>4</answer>", "</think> occurs 0 times, not once"),
        ("4", "<think> occurs 0 times, not once"),
        ("", "<think> occurs 0 times, not once"),
    ],
)
def test_think_then_answer(text: str, why: str) -> None:
    assert format_(skeleton(text), row()) == Score(0.0 if why else 1.0, why)


def test_tags_of_the_row() -> None:
    assert format_(skeleton("<plan>a</plan>"), row(format_tags=["plan"])).reward == 1
    assert format_(skeleton("<think>a</think><answer>4</answer>"), row(format_tags=["plan"])).reward == 0
    check_row(row(format_tags=["plan", "step-2"]), "f:1")
    for bad in ("think", [], ["a", "a"], [1], ["a b"], None):
        with pytest.raises(UserError, match=r"^f:1: metadata\.format_tags = .*must be a list of different names"):
            check_row(row(format_tags=bad), "f:1")


def test_one_form_one_skeleton() -> None:
    assert skeleton("<think>a</think> <answer>4</answer>") == "<think>.</think><answer>.</answer>"
    assert skeleton("<think>b c</think><answer>5</answer>\n") == "<think>.</think><answer>.</answer>"
    assert skeleton("<" * 1000 + "a" * 1000) == "."
