"""The environment of examples/guessing by brute force, and the data of both examples of environments."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(monkeypatch: pytest.MonkeyPatch, folder: str, module: str) -> ModuleType:
    """Import a module of an example. Both examples have a module make_data."""
    monkeypatch.syspath_prepend(EXAMPLES / folder)
    monkeypatch.delitem(sys.modules, module, raising=False)
    return importlib.import_module(module)


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_halving_finds_every_number_in_six_turns(monkeypatch):
    environment = load(monkeypatch, "guessing", "guess").Guess()
    turns = []
    for number in range(20, 52):
        environment.reset({"answer": str(number)})
        possible, done, count = range(20, 52), False, 0
        while not done:
            assert environment.reward() == 0.0
            guess = possible[(len(possible) - 1) // 2]
            observation, done = environment.step(str(guess))
            possible = range(guess + 1, possible[-1] + 1) if "higher" in observation else range(possible[0], guess)
            count += 1
        assert environment.reward() == 1.0
        turns.append(count)
    assert sorted(turns) == [1] + [2] * 2 + [3] * 4 + [4] * 8 + [5] * 16 + [6]


@pytest.mark.parametrize("text", ["", "x", " 7", "-7", "7.0", "\u0667", "\u00b2", "7\n"])
def test_other_texts_are_wrong_guesses(monkeypatch, text):
    environment = load(monkeypatch, "guessing", "guess").Guess()
    environment.reset({"answer": "7"})
    assert environment.step(text) == ("<result>no number</result>", False)
    assert environment.reward() == 0.0


@pytest.mark.parametrize(("name", "file"), [("Guess", "train"), ("GuessWithoutFeedback", "no_feedback")])
def test_games_of_the_warm_start_are_those_of_the_environment(monkeypatch, tmp_path, name, file):
    data = load(monkeypatch, "guessing", "make_data")
    data.main(tmp_path)
    environment = getattr(data, name)()
    train = rows(tmp_path / f"{file}.jsonl")
    for row in train:
        turns = re.split("(<result>.*?</result>)", row["target"])
        environment.reset(row)
        for guess, observation in zip(turns[:-1:2], turns[1::2], strict=True):
            assert environment.step(guess) == (observation, False)
        assert environment.step(turns[-1])[1]
        assert len(turns) <= 2 * 6 - 1
        assert name == "Guess" or set(turns[1::2]) <= {"<result>wrong</result>"}


def test_products_are_right_and_held_out_ones_are_new(monkeypatch, tmp_path):
    load(monkeypatch, "calculator", "make_data").main(tmp_path)
    found = {name: rows(tmp_path / f"{name}.jsonl") for name in ("train", "alone", "held_out")}
    for row in (row for own in found.values() for row in own):
        a, b = map(int, row["prompt"].split("*"))
        assert int(row["answer"]) == a * b
    assert [row["prompt"] for row in found["train"]] == [row["prompt"] for row in found["alone"]]
    assert len({row["prompt"] for row in (*found["train"], *found["held_out"])}) == 4400
    for row in found["train"]:
        result = row["answer"]
        assert row["target"] == f"<call>calculate: {row['prompt']}</call><result>{result}</result>{result}"
