"""Write games of number guessing as rows: `train.jsonl`, `no_feedback.jsonl` and `held_out.jsonl`.

The player of the examples guesses a random number of those that are still possible. A better player halves them. The
held-out rows have other bounds than the training rows.

python examples/guessing/make_data.py runs/guessing/data
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from guess import Guess, GuessWithoutFeedback

SIZE = 32  # numbers between the bounds
MAX_TURNS = 6
TRAIN = 4000
HELD_OUT = 400


def game(lowest: int, number: int, environment: Guess, player: random.Random) -> str | None:
    """Return the turns of a game and the observations between them, or None if the number was not found."""
    environment.reset({"answer": str(number)})
    possible = set(range(lowest, lowest + SIZE))
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


def rows(environment: Guess, is_held_out: bool, count: int, seed: int) -> list[dict[str, str]]:
    """Return rows of won games. Every fifth lower bound is held out."""
    player = random.Random(seed)
    found: list[dict[str, str]] = []
    while len(found) < count:
        lowest = player.randrange(10, 100 - SIZE)
        number = player.randrange(lowest, lowest + SIZE)
        if (lowest % 5 == 0) is not is_held_out:
            continue
        target = game(lowest, number, environment, player)
        if target is not None:
            prompt = f"{lowest} to {lowest + SIZE - 1}"
            found.append({"id": str(len(found)), "prompt": prompt, "answer": str(number), "target": target})
    return found


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, found in {
        "train": rows(Guess(), False, TRAIN, 0),
        "no_feedback": rows(GuessWithoutFeedback(), False, TRAIN, 1),
        "held_out": rows(Guess(), True, HELD_OUT, 2),
    }.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
