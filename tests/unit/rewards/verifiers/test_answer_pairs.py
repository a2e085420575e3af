r"""Right and wrong answers written by hand: kind, whether it is right, reference, answer, reason.

"1" is right, "0" is wrong, and "fn" is right but refused. In the kinds `hashes` and `choice` the answer is a whole
response, in which a line ends at \u23ce.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_brorl.rewards.verifiers import choice
from megatron_brorl.rewards.verifiers import math as math_verifier

PAIRS = [line.split("\t") for line in Path(__file__).with_name("answer_pairs.tsv").read_text("utf-8").splitlines()]


def reward(kind: str, reference: str, answer: str) -> float:
    row = {"id": "0", "prompt": "", "answer": reference, "metadata": {}}
    verifier = choice if kind == "choice" else math_verifier
    found = verifier.find(answer.replace("\u23ce", "\n")) if kind in ("hashes", "choice") else answer
    return 0.0 if found is None else verifier.verify(found, row).reward


@pytest.mark.parametrize("kind", sorted({pair[0] for pair in PAIRS}))
def test_only_right_answers_are_rewarded(kind):
    pairs = [pair for pair in PAIRS if pair[0] == kind]
    paid = {(reference, answer) for _, _, reference, answer, _ in pairs if reward(kind, reference, answer) == 1}
    assert paid == {(reference, answer) for _, right, reference, answer, _ in pairs if right == "1"}


@pytest.mark.parametrize(
    ("reference", "answer"), [(r"\{\pi, 1\}", r"\{1, 3.14159\}"), (r"\pi", "3.14159"), (r"\{\pi\}", "3.14159")]
)
def test_decimal_answer_matches_irrational_reference_but_not_vice_versa(reference, answer):
    assert reward("", reference, answer) == 1
    assert reward("", answer, reference) == 0
