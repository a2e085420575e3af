from __future__ import annotations

import pytest

from megatron_brorl.errors import UserError
from megatron_brorl.rewards.exact import check_row, exact
from megatron_brorl.rewards.verifier import VerifierRow


def row(answer: str | None) -> VerifierRow:
    return VerifierRow(id="r", prompt="?", answer=answer, metadata={})


@pytest.mark.parametrize(
    ("answer", "reference", "reward"),
    [(" 42\n", "42", 1.0), ("42.0", "42", 0.0), ("", None, 0.0), ("", "", 1.0), ("a b", " a b ", 1.0)],
)
def test_exact(answer: str, reference: str | None, reward: float) -> None:
    score = exact(answer, row(reference))
    assert (score.reward, score.reason) == (reward, "" if reward else "not the reference answer")


def test_a_row_has_a_reference() -> None:
    check_row(row(""), "f:1")
    with pytest.raises(UserError, match=r'^f:1: verifier "exact" compares with the answer.*add "answer"$'):
        check_row(row(None), "f:1")
