"""Environments of number guessing: a turn of the model is a guess, and the observation says whether it is too low."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Guess:
    """A game in which the model must find the number row["answer"]. The reward is 1 if it does, else 0."""

    def reset(self, row: Mapping[str, Any]) -> None:
        self._number = int(row["answer"])
        self._found = False

    def step(self, text: str) -> tuple[str, bool]:
        """Return the observation after a guess, and whether the number was found."""
        guess = int(text) if text.isascii() and text.isdigit() else None
        self._found = guess == self._number
        # Without a chat template, the tags separate observations from turns.
        return f"<result>{self._feedback(guess)}</result>", self._found

    def _feedback(self, guess: int | None) -> str:
        if guess is None:
            return "no number"
        return "higher" if guess < self._number else "lower"

    def reward(self) -> float:
        return float(self._found)


class GuessWithoutFeedback(Guess):
    """A game whose observations only say that the guess is wrong."""

    def _feedback(self, guess: int | None) -> str:
        return "wrong"
