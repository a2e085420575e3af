"""Responses that follow each instruction and responses that do not, by the published rules, and counts by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_brorl.rewards.verifiers.ifeval import check_row, follows, loose_readings
from megatron_brorl.rewards.verifiers.ifeval_checks import CHECKS, count_capital_words, count_sentences, count_words

# Kind, arguments, responses that follow it, responses that do not.
LINES = Path(__file__).with_name("ifeval_cases.jsonl").read_text("utf-8").splitlines()
CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [tuple(json.loads(line)) for line in LINES]


def test_every_published_instruction_has_cases() -> None:
    assert {kind for kind, *_ in CASES} == CHECKS.keys()
    assert len(CHECKS) == 25  # table 4 of the paper


@pytest.mark.parametrize(("kind", "arguments", "right", "wrong"), CASES)
def test_checks(kind: str, arguments: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    metadata = {"instruction_id_list": [kind], "kwargs": [arguments]}
    check_row({"id": "a", "prompt": "p", "answer": None, "metadata": metadata}, "f:1")
    assert [text for text in right if not follows(kind, arguments, text)] == []
    assert [text for text in [*wrong, "", " \n"] if follows(kind, arguments, text)] == []


def test_deeply_nested_json_is_not_followed() -> None:
    assert not follows("detectable_format:json_format", {}, "[" * 100_000)


def test_loose_readings() -> None:
    assert loose_readings("Sure:\n*a*\nb\nBye") == [
        "Sure:\n*a*\nb\nBye",
        "*a*\nb\nBye",
        "Sure:\n*a*\nb",
        "*a*\nb",
        "Sure:\na\nb\nBye",
        "a\nb\nBye",
        "Sure:\na\nb",
        "a\nb",
    ]
    assert loose_readings("one line") == ["one line", ""]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("...", 0),
        ("No mark at the end", 1),
        ("One. Two! Three? Four", 4),
        ("What?! No!!! Well...", 3),
        ("Line one\nline two\n\nline three", 1),
        ("Mr. Smith and Dr. J. R. Jones met at 5 p.m. in the U.S. embassy.", 1),
        ("It begins at 5 p.m. The doors open before.", 2),
        ("Apples, pears, etc. are fruit, e.g. sweet ones, i.e. ripe ones (cf. fig. 3).", 1),
        ("Pi is 3.14 and example.com is a site; see v1.2.", 1),
        ('"Stop." "Go!" (He went.) **Then he stopped.**', 4),
        ("He said “no.” She said »yes!« They left.", 3),
        ("Well... maybe. Wait… What?", 3),
        ("1. Mix.\n2. Bake.", 4),  # as nltk counts
        ("am 3. tag der reise", 1),
        ("今日は晴れです。明日は雨ですか\uff1fはい\uff01", 3),
        ("यह एक वाक्य है। यह दूसरा है।", 2),
    ],
)
def test_sentences(text: str, count: int) -> None:
    assert count_sentences(text) == count


@pytest.mark.parametrize(
    ("text", "words", "capitals"),
    [
        ("", 0, 0),
        ("WELL-KNOWN, IT'S", 4, 2),
        ("**BOLD**;NEXT—LAST", 3, 3),
        ("A1 2 _ b2", 4, 1),
        ("I... AM ÜBER über", 4, 3),
    ],
)
def test_words(text: str, words: int, capitals: int) -> None:
    assert count_words(text) == words
    assert count_capital_words(text) == capitals
