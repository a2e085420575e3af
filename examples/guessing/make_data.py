"""Write games of number guessing as rows: `train.jsonl`, `no_feedback.jsonl` and `held_out.jsonl`.

The player of the examples guesses a random number of those that are still possible. A better player halves them. All
games have the same prompt, so held-out games test how well the model uses feedback, not whether it knows new numbers.

python examples/guessing/make_data.py runs/guessing/data
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from guess import Guess, GuessWithoutFeedback

NUMBERS = range(10, 42)
PROMPT = f"{NUMBERS[0]} to {NUMBERS[-1]}"
MAX_TURNS = 6
TRAIN = 4000
HELD_OUT = 400


def game(number: int, environment: Guess, player: random.Random) -> str | None:
    """Return the turns of a game and the observations between them, or None if the number was not found."""
    environment.reset({"answer": str(number)})
    possible = set(NUMBERS)
    text = ""
    for _ in range(MAX_TURNS):
        guess = player.choice(sorted(possible))
        observation, done = environment.step(str(guess))
        text += str(guess)
        if done:
            return text
        text += observation
        possible.discard(guess)
        if "higher" in observation:
            possible = {i for i in possible if i > guess}
        elif "lower" in observation:
            possible = {i for i in possible if i < guess}
    return None


def rows(environment: Guess, count: int, seed: int) -> list[dict[str, str]]:
    """Return rows of won games."""
    player = random.Random(seed)
    found: list[dict[str, str]] = []
    while len(found) < count:
        number = player.choice(NUMBERS)
        target = game(number, environment, player)
        if target is not None:
            found.append({"prompt": PROMPT, "answer": str(number), "target": target})
    return found


def main(folder: Path) -> None:
    numbers = random.Random(2)
    held_out = [numbers.choice(NUMBERS) for _ in range(HELD_OUT)]
    folder.mkdir(parents=True, exist_ok=True)
    for name, found in {
        "train": rows(Guess(), TRAIN, 0),
        "no_feedback": rows(GuessWithoutFeedback(), TRAIN, 1),
        "held_out": [{"prompt": PROMPT, "answer": str(number)} for number in held_out],
    }.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
