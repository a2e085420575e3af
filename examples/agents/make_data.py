"""Write the rows of the examples of agents, and turns for supervised training, to runs/agents."""

import itertools
import json
import random
from pathlib import Path

from guess import hint

RANDOM = random.Random(0)
BOUNDS = [(low, low + size - 1) for low in range(10, 60) for size in range(24, 33) if low + size <= 60]
LETTERS = "abcdefgh"
WORDS = list(itertools.product(LETTERS, repeat=4))


def game(low, high):
    """Return a row of the game."""
    return {"prompt": f"{low} to {high}", "answer": str(RANDOM.randint(low, high))}


def game_turns(row):
    """Yield a row for every turn of a player that guesses at random among the numbers that are still possible."""
    low, high = map(int, row["prompt"].split(" to "))
    possible = range(low, high + 1)
    messages = [{"role": "user", "content": row["prompt"]}]
    for _ in range(6):
        guess = str(RANDOM.choice(possible))
        yield {"prompt": list(messages), "answer": guess}
        if guess == row["answer"]:
            return
        reply = hint(guess, row["answer"])
        messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": reply}]
        possible = [n for n in possible if str(n) != guess and hint(guess, str(n)) == reply]


def reversal(*letters):
    """Return a row of a word to spell backward."""
    return {"prompt": " ".join(letters), "answer": " ".join(reversed(letters))}


def reversal_turns(row):
    """Yield a row for the writer, one for its second try, and one for the checker."""
    right, prompt = row["answer"], row["prompt"]
    letters = right.split()
    position = RANDOM.randrange(len(letters))
    letters[position] = RANDOM.choice([letter for letter in LETTERS if letter != letters[position]])
    wrong = " ".join(letters)
    answer, verdict = RANDOM.choice(((right, "yes"), (wrong, "no")))
    writer = [{"role": "system", "content": "reverse"}, {"role": "user", "content": prompt}]
    retry = [{"role": "assistant", "content": wrong}, {"role": "user", "content": "no"}]
    yield {"prompt": writer, "answer": right}
    yield {"prompt": [*writer, *retry], "answer": right}
    checked = [{"role": "system", "content": "check"}, {"role": "user", "content": f"{prompt} = {answer}"}]
    yield {"prompt": checked, "answer": verdict}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main():
    folder = Path("runs/agents")
    folder.mkdir(parents=True, exist_ok=True)
    examples = (("guess", game, game_turns, BOUNDS), ("check", reversal, reversal_turns, WORDS))
    for name, make_row, turns, problems in examples:
        RANDOM.shuffle(problems)
        quarter = len(problems) // 4
        rows = {
            part: [make_row(*RANDOM.choice(chosen)) for _ in range(count)]
            for part, chosen, count in (("held_out", problems[:quarter], 300), ("train", problems[quarter:], 8000))
        }
        for part, part_rows in rows.items():
            write(folder / f"{name}_{part}.jsonl", part_rows)
        write(folder / f"{name}_turns.jsonl", [turn for row in rows["train"] for turn in turns(row)])


if __name__ == "__main__":
    main()
