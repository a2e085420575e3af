"""Verifier `exact`: the response must equal the reference, character by character."""

from __future__ import annotations

from megatron_brorl.errors import UserError
from megatron_brorl.rewards.verifier import Score, VerifierRow


def verify(answer: str, row: VerifierRow) -> Score:
    """Return 1 if the answer equals the reference. White space at both ends is ignored."""
    reference = row["answer"]
    if reference is not None and answer.strip() == reference.strip():
        return Score(1.0)
    return Score(0.0, "not the reference answer")


def check_row(row: VerifierRow, where: str) -> None:
    """Raise UserError if the row has no reference."""
    if row["answer"] is None:
        raise UserError(f'{where}: verifier "exact" needs a reference; add "answer"')
