"""Environments of number guessing: a turn of the model is a guess, and the observation is a hint."""

from collections.abc import Mapping
from typing import Any


class Guess:
    """A game in which the model must find the number row["answer"]. The reward is 1 if it does, else 0."""

    def reset(self, row: Mapping[str, Any]) -> None:
        self._number = int(row["answer"])
        self._found = False

    def hint(self, guess: int, number: int) -> str:
        return "higher" if number > guess else "lower"

    def step(self, text: str) -> tuple[str, bool]:
        """Return the observation after a guess, and whether the number was found."""
        guess = int(text) if text.isascii() and text.isdigit() else None
        self._found = guess == self._number
        hint = "no number" if guess is None else self.hint(guess, self._number)
        # Without a chat template, the tags separate observations from turns.
        return f"<result>{hint}</result>", self._found

    def reward(self) -> float:
        return float(self._found)


class GuessWithoutFeedback(Guess):
    def hint(self, guess: int, number: int) -> str:
        return "wrong"
