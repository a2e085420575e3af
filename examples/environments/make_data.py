"""Write training and held-out rows of the examples of environments, with different prompts, to runs/environments."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from guess import Guess, GuessWithoutFeedback

RANDOM = random.Random(0)
PRODUCTS = [(a, b) for a in range(100, 1000) for b in range(10, 100)]
BOUNDS = [(low, low + size - 1) for low in range(10, 60) for size in range(24, 33) if low + size <= 60]


def product(a: int, b: int) -> dict[str, str]:
    """Return a row whose target shows how to use the tool."""
    answer = str(a * b)
    target = f"<call>calculate: {a}*{b}</call><result>{answer}</result>{answer}"
    return {"prompt": f"{a}*{b}=", "answer": answer, "target": target}


def game(low: int, high: int) -> dict[str, str]:
    """Return a row with the targets of a game with and without feedback."""
    numbers = range(low, high + 1)
    row = {"prompt": f"{low} to {high}: ", "answer": str(RANDOM.choice(numbers))}
    games = {"feedback": Guess(), "no_feedback": GuessWithoutFeedback()}
    return row | {column: play(environment, row, numbers) for column, environment in games.items()}


def play(environment: Guess, row: dict[str, str], possible: Sequence[int]) -> str:
    """Return the text of a game in which the player guesses a random number of those that are still possible."""
    environment.reset(row)
    text = ""
    for _ in range(6):
        guess = RANDOM.choice(possible)
        observation, solved = environment.step(str(guess))
        text += f"{guess}{observation}"
        if solved:
            break
        reply = environment.hint(guess, int(row["answer"]))
        possible = [number for number in possible if number != guess and environment.hint(guess, number) == reply]
    return text.removesuffix(observation)  # a rollout ends with a guess


def main() -> None:
    folder = Path("runs/environments")
    folder.mkdir(parents=True, exist_ok=True)
    for name, make_row, problems in (("calculator", product, PRODUCTS), ("guessing", game, BOUNDS)):
        RANDOM.shuffle(problems)
        quarter = len(problems) // 4
        for part, chosen, count in (("held_out", problems[:quarter], 400), ("train", problems[quarter:], 16000)):
            rows = [make_row(*RANDOM.choice(chosen)) for _ in range(count)]
            (folder / f"{name}_{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
