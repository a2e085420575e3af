r"""The table of answers, right and wrong: its kind, whether it is right, the reference, the answer, and why.

"1" is right, "0" is wrong, and "fn" is right but refused: docs/verifiers_math.md lists what is not supported. In the
kinds `hashes` and `choice` the answer is a whole response, in which a line ends at \u23ce. All was derived by hand.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from megatron_brorl.rewards import choice_verifier, math_verifier

PAIRS = [line.split("\t") for line in Path(__file__).with_name("answer_pairs.tsv").read_text("utf-8").splitlines()]


def reward(kind: str, reference: str, answer: str) -> float:
    row = {"id": "0", "prompt": "", "answer": reference, "metadata": {}}
    verifier = choice_verifier if kind == "choice" else math_verifier
    found = verifier.find(answer.replace("\u23ce", "\n")) if kind in ("hashes", "choice") else answer
    return 0.0 if found is None else verifier.verify(found, row).reward


@pytest.mark.parametrize("kind", sorted({pair[0] for pair in PAIRS}))
def test_no_wrong_answer_is_paid_and_no_right_one_refused_but_those_marked(kind):
    pairs = [pair for pair in PAIRS if pair[0] == kind]
    paid = {(reference, answer) for _, _, reference, answer, _ in pairs if reward(kind, reference, answer) == 1}
    assert paid == {(reference, answer) for _, right, reference, answer, _ in pairs if right == "1"}


def test_size_of_the_table():
    assert len({tuple(pair[:1] + pair[2:4]) for pair in PAIRS}) == len(PAIRS) >= 200
    count = Counter(right for _, right, *_ in PAIRS)
    assert count["0"] > 150
    assert count["1"] > 150
    assert count["fn"] <= 6


@pytest.mark.parametrize(
    ("reference", "answer"),
    [(r"\{\pi, 1\}", r"\{1, 3.14159\}"), (r"\pi", "3.14159"), (r"\{\pi\}", "3.14159")],
)
def test_a_decimal_stands_for_an_irrational_number_and_not_the_other_way_round(reference, answer):
    assert reward("", reference, answer) == 1
    assert reward("", answer, reference) == 0
