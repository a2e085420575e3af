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


def load(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """Import a module of an example. Both examples have a module make_data."""
    folder, _, module = name.partition("/")
    monkeypatch.syspath_prepend(EXAMPLES / folder)
    monkeypatch.delitem(sys.modules, module, raising=False)
    return importlib.import_module(module)


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def play(environment, number: int, guesses) -> list[tuple[str, bool]]:
    environment.reset({"answer": str(number)})
    return [environment.step(guess) for guess in guesses]


def test_halving_finds_every_number_in_six_turns(monkeypatch):
    guess = load(monkeypatch, "guessing/guess")
    turns = []
    for number in range(20, 52):
        environment = guess.Guess()
        environment.reset({"answer": str(number)})
        low, high, done, count = 20, 51, False, 0
        while not done:
            middle = (low + high) // 2
            observation, done = environment.step(str(middle))
            count += 1
            if not done:
                assert observation == f"<result>{'higher' if number > middle else 'lower'}</result>"
                low, high = (middle + 1, high) if number > middle else (low, middle - 1)
        assert environment.reward() == 1.0
        turns.append(count)
    assert sorted(turns) == sorted([1] + [2] * 2 + [3] * 4 + [4] * 8 + [5] * 16 + [6])


@pytest.mark.parametrize("text", ["", "x", " 7", "-7", "7.0", "\u0667", "\u00b2", "7\n"])
def test_other_texts_are_wrong_guesses(monkeypatch, text):
    guess = load(monkeypatch, "guessing/guess")
    environment = guess.Guess()
    assert play(environment, 7, [text]) == [("<result>no number</result>", False)]
    assert environment.reward() == 0.0
    assert play(environment, 7, ["7"])[0][1]
    assert environment.reward() == 1.0


def test_without_feedback_observations_are_the_same(monkeypatch):
    guess = load(monkeypatch, "guessing/guess")
    found = play(guess.GuessWithoutFeedback(), 7, ["3", "9", "x", "7"])
    assert {observation for observation, _ in found} == {"<result>wrong</result>"}
    assert [done for _, done in found] == [False, False, False, True]


@pytest.mark.parametrize("name", ["Guess", "GuessWithoutFeedback"])
def test_games_of_the_warm_start_are_those_of_the_environment(monkeypatch, tmp_path, name):
    data = load(monkeypatch, "guessing/make_data")
    data.main(tmp_path)
    train = rows(tmp_path / ("train.jsonl" if name == "Guess" else "no_feedback.jsonl"))
    environment = getattr(data, name)()
    for row in train:
        guesses = re.sub("<result>.*?</result>", " ", row["target"]).split()
        found = play(environment, int(row["answer"]), guesses)
        text = "".join(guess + observation for guess, (observation, _) in zip(guesses, found, strict=True))
        assert row["target"] == text.removesuffix(found[-1][0])
        assert [done for _, done in found] == [False] * (len(guesses) - 1) + [True]
        assert len(guesses) <= 6
    held_out = rows(tmp_path / "held_out.jsonl")
    assert not {row["prompt"] for row in held_out} & {row["prompt"] for row in train}
    assert len({row["id"] for row in train}) == len(train) == 4000


def test_products_are_right_and_not_repeated(monkeypatch, tmp_path):
    load(monkeypatch, "calculator/make_data").main(tmp_path)
    found = {name: rows(tmp_path / f"{name}.jsonl") for name in ("train", "alone", "held_out")}
    for row in (row for own in found.values() for row in own):
        a, b = map(int, row["prompt"].split("*"))
        assert int(row["answer"]) == a * b
    prompts = {name: {row["prompt"] for row in own} for name, own in found.items()}
    assert prompts["train"] == prompts["alone"]
    assert len(prompts["train"] | prompts["held_out"]) == 4400
    for row in found["train"]:
        assert (
            row["target"] == f"<call>calculate: {row['prompt']}</call><result>{row['answer']}</result>{row['answer']}"
        )
