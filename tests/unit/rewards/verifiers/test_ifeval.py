"""Verifier `ifeval`: each check against responses written by hand, rewards and reasons, and errors of invalid rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import langdetect
import pytest
from langdetect import detector_factory
from rows import row

from megatron_brorl.rewards.verifiers import ifeval
from megatron_brorl.rewards.verifiers.ifeval import (
    CHECKS,
    check_row,
    count_capital_words,
    count_sentences,
    count_words,
    find,
    follows,
    loose_readings,
    verify,
)

TWO = {
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
    "kwargs": [{}, {"relation": "at least", "num_words": 3, "num_bullets": None}],
}


@pytest.mark.parametrize(
    ("answer", "reward", "failed"),
    [
        ("a b c", 1.0, []),
        ("a, b c", 0.5, ["punctuation:no_comma"]),
        ("a b", 0.5, ["length_constraints:number_words"]),
        ("a, b", 0.0, ["punctuation:no_comma", "length_constraints:number_words"]),
    ],
)
def test_reward_is_the_share_of_followed_instructions(answer, reward, failed):
    result = verify(answer, row(**TWO))
    assert result.reward == reward
    assert result.parts == {name: float(name not in failed) for name in TWO["instruction_id_list"]}
    assert result.reason == (f"not followed: {', '.join(failed)}" if failed else "")
    assert verify(answer, row(**TWO, all=True)).reward == float(not failed)


def test_loose_mode_ignores_lines_and_asterisks_per_instruction():
    answer = "Sure, here it is:\na b c"  # loose scoring removes the comma with the first line
    assert verify(answer, row(**TWO)).reward == 0.5
    assert verify(answer, row(**TWO, mode="loose")).reward == 1.0
    quoted = row(instruction_id_list=["startend:quotation"], kwargs=[{}])
    assert verify('*"a"*', quoted).reward == 0.0
    quoted["metadata"]["mode"] = "loose"
    assert verify('*"a"*', quoted).reward == 1.0


def test_responses_below_min_words_score_zero():
    assert verify("a b c", row(**TWO, min_words=3)).reward == 1.0
    result = verify("a b c", row(**TWO, min_words=4))
    assert result == (0.0, "fewer than 4 words (min_words)", {})


def test_repeated_instructions_have_separate_parts():
    thrice = {"instruction_id_list": ["keywords:existence"] * 3, "kwargs": [{"keywords": [k]} for k in ("a", "b", "a")]}
    result = verify("a", row(**thrice))
    assert result.parts == {"keywords:existence": 1.0, "keywords:existence#2": 0.0, "keywords:existence#3": 1.0}
    assert result.reward == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("text", "answer"),
    [("all of it \n", "all of it"), ("<think>a</think>b</think>\n\nc", "c"), ("<think>a</think> \n", None)],
)
def test_answer_is_the_text_after_the_thought(text, answer):
    assert find(text) == answer


def test_detected_language_is_deterministic(monkeypatch):
    """Other code in the process may have set any seed of the library."""
    text = "Hello"
    alone, ours = set(), set()
    for seed in range(20):
        monkeypatch.setattr(langdetect.DetectorFactory, "seed", seed)
        alone.add(langdetect.detect(text))
        ifeval.detected_language.cache_clear()
        ours.add(ifeval.detected_language(text))
    assert len(ours) == 1
    assert len(alone) > 1  # otherwise the text would not depend on the seed


def test_languages_are_those_of_the_library():
    detector_factory.init_factory()
    assert set(detector_factory._factory.get_lang_list()) == ifeval.LANGUAGES


LINES = Path(__file__).with_name("ifeval_cases.jsonl").read_text("utf-8").splitlines()
# Each case: kind and arguments of an instruction, responses that follow it, and responses that do not.
CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [tuple(json.loads(line)) for line in LINES]


def test_every_published_instruction_has_cases():
    assert {kind for kind, *_ in CASES} == CHECKS.keys()
    assert len(CHECKS) == 25  # table 4 of the paper


@pytest.mark.parametrize(("kind", "arguments", "right", "wrong"), CASES)
def test_checks_on_hand_written_responses(kind, arguments, right, wrong):
    metadata = {"instruction_id_list": [kind], "kwargs": [arguments]}
    check_row(row(**metadata), "f:1")
    assert [text for text in right if not follows(kind, arguments, text)] == []
    assert [text for text in [*wrong, "", " \n"] if follows(kind, arguments, text)] == []


def test_deeply_nested_json_does_not_follow_the_json_instruction():
    assert not follows("detectable_format:json_format", {}, "[" * 100_000)


def test_loose_readings():
    starred = ["Sure:\n*a*\nb\nBye", "*a*\nb\nBye", "Sure:\n*a*\nb", "*a*\nb"]
    assert loose_readings(starred[0]) == [*starred, *(text.replace("*", "") for text in starred)]
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
def test_count_sentences(text, count):
    assert count_sentences(text) == count


@pytest.mark.parametrize(
    ("text", "words", "capitals"),
    [("", 0, 0), ("WELL-KNOWN, IT'S", 4, 2), ("A1 2 _ b2", 4, 1), ("I... AM ÜBER—über", 4, 3)],
)
def test_count_words(text, words, capitals):
    assert count_words(text) == words
    assert count_capital_words(text) == capitals
