"""Verifier `none`: every response scores 0, for prompts on which a student learns only from its teacher."""

from __future__ import annotations

from megatron_brorl.rewards.verifier import Score, VerifierRow


def verify(answer: str, row: VerifierRow) -> Score:
    """Return 0."""
    return Score(0.0, "not scored")


def check_row(row: VerifierRow, where: str) -> None:
    """Accept every row."""
