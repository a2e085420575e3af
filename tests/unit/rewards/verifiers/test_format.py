from __future__ import annotations

import pytest
from rows import row

from megatron_brorl.rewards.verifier import Score
from megatron_brorl.rewards.verifiers.format import skeleton, verify


def test_responses_of_one_form_have_one_skeleton():
    assert skeleton("<think>a</think> <answer>4</answer>") == "<think>.</think><answer>.</answer>"
    assert skeleton("<think>b c</think><answer>5</answer>\n") == "<think>.</think><answer>.</answer>"
    assert skeleton("<" * 1000 + "a" * 1000) == "."


FULL = "<think>a</think><answer>4</answer>"
REST = "a</think>\n<answer>4</answer>"
MALFORMED = [
    "<think></think><answer>4</answer>",
    "<think>a</think><answer> \n</answer>",
    "Well: " + FULL,
    "<answer>4</answer><think>a</think>",
    "<think>a<answer>4</answer></think>",
    FULL + "<answer>5</answer>",
]
ENDS = [
    # End of the prompt, tags of the row, right responses, wrong responses.
    ("<|assistant|>\n<think>\n", None, [REST], [FULL, "</think><answer>4</answer>", "<answer>4</answer>", "a"]),
    ("<|assistant|><think>", None, [REST, " b < c " + REST], [FULL, f"{REST}!", REST + REST, "<think>" + FULL]),
    ("<think>\n\n</think>\n\n", None, ["<answer>4</answer>"], [FULL, REST, "4", "<answer></think></answer>"]),
    ("<think>a</think>\n<answer>", None, ["4</answer>"], [FULL, REST, "<answer>4</answer>", "</answer>", "4"]),
    ("<reasoning>\n", ["reasoning", "solution"], ["r</reasoning><solution>4</solution>"], [REST, FULL]),
    ("<think>\n", ["answer"], ["a</think><answer>4</answer>", "<answer>4</answer>"], [FULL, "a", "a</think>4"]),
    ("<think>\nOkay,", None, [REST, "</think><answer>4</answer>"], ["a", "<answer>4</answer>"]),
    # The prompt mentions tags without opening one.
    ("as <think>...</think><answer>...</answer>", None, [FULL], [REST, "4</answer>"]),
    ("in <think></think> and <answer></answer> tags.<|im_end|>\n<|im_start|>assistant\n", None, [FULL], [REST]),
    ("Begin with <think>.<|im_end|>\n<|im_start|>assistant\n", None, [FULL], [REST, "</think><answer>4</answer>"]),
    ("Is 3 <b> 4?", None, [FULL], [REST]),
    ("", ["plan"], ["<plan>a</plan>"], [FULL]),
    ("", None, [FULL, "<think> a < b </think>\n <answer>x <y> z</answer>\n"], [REST, *MALFORMED]),
]


@pytest.mark.parametrize(("end", "tags", "right", "wrong"), ENDS, ids=[end for end, *_ in ENDS])
def test_prompt_may_end_inside_the_form(end, tags, right, wrong):
    for before in ("", "What is 2 + 2? ", "Write <think>a</think><answer>b</answer>. <|im_start|>"):
        task = row(prompt=before + end, **({"format_tags": tags} if tags else {}))
        if end == "" and before:
            continue
        for text in right:
            assert verify(skeleton(text), task) == Score(1.0), (before, text)
        for text in wrong:
            score = verify(skeleton(text), task)
            assert score.reward == 0, (before, text)
            assert score.reason
