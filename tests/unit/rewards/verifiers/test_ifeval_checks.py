"""Responses that follow each instruction and responses that do not, by the published rules, and counts by hand."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_brorl.rewards.verifiers.ifeval import check_row, follows, loose_readings
from megatron_brorl.rewards.verifiers.ifeval_checks import CHECKS, count_capital_words, count_sentences, count_words

PROSE = "The quick brown fox jumps over the lazy dog while the old farmer watches from his quiet house on the hill."
GERMAN = "Der alte Bauer sieht von seinem ruhigen Haus auf dem Hügel zu und freut sich über das schöne Wetter."

# kind, arguments, responses that follow it, responses that do not
CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    (
        "keywords:existence",
        {"keywords": ["dog", "3.5"]},
        ["A DOG of 3.5 kg", "hotdogs cost 3.5"],  # capitals do not matter, and it may stand within a word
        ["a dog", "a dog of 325 kg"],  # a keyword is no pattern
    ),
    (
        "keywords:frequency",
        {"keyword": "rock", "frequency": 2, "relation": "at least"},
        ["Rock and ROCKS", "rockrock"],
        ["rock", "a stone"],
    ),
    (
        "keywords:frequency",
        {"keyword": " rock ", "frequency": 2, "relation": "less than"},  # white space around it is no part of it
        ["rock", "a stone"],
        ["Rock and rocks"],
    ),
    (
        "keywords:forbidden_words",
        {"forbidden_words": ["jam", "tea time"]},
        ["jams and pyjamas", "teatime"],  # parts of other words are allowed
        ["Jam!", "no-jam", "at TEA TIME"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "Q", "let_frequency": 2, "let_relation": "at least"},
        ["Quick quips", "qq"],
        ["quick", "none"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "#", "let_frequency": 1, "let_relation": "less than"},
        ["plain"],
        ["# heading"],
    ),
    ("language:response_language", {"language": "de"}, [GERMAN, "12 34"], [PROSE]),  # no letters: any language
    ("language:response_language", {"language": "hi"}, ["आज मौसम बहुत अच्छा है और हम बाहर घूमने जा रहे हैं।"], [PROSE]),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "at least"},
        ["one two three", "well-known fact", "it's so"],  # runs of letters and digits are counted
        ["one two", "a — b"],
    ),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, ["one two"], ["one two three"]),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "at least"},
        ["One. Two.", "Really? Yes", '"Stop!" he said.'],
        ["Dr. Smith paid 3.50 to J. Doe, e.g. in May", "one\n\ntwo"],
    ),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}, ["One."], ["One. Two."]),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a\n***\nb", "***\na\n***\nb\n***", "a *** b"],  # dividers may open and close
        ["a", "a\n***\nb\n***\nc", "a\n***\n***\nb", "a\n\nb"],  # no empty one in between
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 1}, ["a\n\nb", "a\n***"], ["a\n***\nb"]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Home"},
        ["a\n\nhome b", "a\n\n'HOME', b", 'a\n\n"Home" b', "a\n\nhome. b"],
        [
            "a\n\nb home",
            "home\n\na",
            "a\n\nhome b\n\nc",
            "a\n\nhomes",
            "\n\na\n\nhome",  # the empty one has a place: the second is "a"
            "a\n\n\n\nhome",  # and here the second is empty
        ],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[name] at [address]", "[] [[x]]"],
        ["[name]", "[one\n] [two]", "[ [one]"],
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["x\nP.S. y", "p. s. y"], ["PS y", "P.S y"]),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.P.S"},
        ["x\nP.P.S y", "p. p. s y", "P.P.S. y"],
        ["P.S. y", "PPS y"],
    ),
    ("detectable_content:postscript", {"postscript_marker": "N.B."}, ["x n.b. y"], ["P.S. y", "nxbx"]),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n* b", "Two:\n  - a\n  * b", "*a\n-b\n**bold**", "- a\n\n\n- b"],
        ["* a", "* a\n* b\n* c", "** a\n** b", "a * b\n* c"],
    ),
    ("detectable_format:constrained_response", {}, ["My answer is maybe.", "Well: My answer is no."], ["yes", "no."]),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*a* and *b*", "**a** *b*", "*a b*\n*c*"],
        ["*a* and b", "* a\n* b", "** ** *a*", "*a\nb* *c"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        ["Section 1\na\nSection 2\nb", "Section1 Section 7"],  # the numbers do not matter
        ["Section 1\na", "SECTION 1 SECTION 2", "Section one Section two"],
    ),
    (
        "detectable_format:json_format",
        {},
        ['{"a": [1]}', '```json\n{"a": 1}\n```', "```\n[1, 2]\n```", "3"],
        ['{"a": 1', "{'a': 1}", 'Here: {"a": 1}', "[" * 100_000],
    ),
    (
        "detectable_format:title",
        {},
        ["<<joy>>\nx", "x <<<a>>", "<<a>> <b>>"],
        ["<joy>", "<<>>", "<< >>", "<<joy\n>>", ">>a<<"],
    ),
    (
        "combination:two_responses",
        {},
        ["a\n******\nb", "******a******b******"],
        ["a", "a******a", "a******b******c", "a************b", "******a******"],
    ),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Name a river. "},
        ["name a River. The Rhine."],
        ["The Rhine. Name a river.", "Name  a river. The Rhine."],
    ),
    (
        "startend:end_checker",
        {"end_phrase": "Any other questions?"},
        ["Yes. any other QUESTIONS?\n", '"Yes. Any other questions?"'],
        ["Any other questions? Yes.", "Any other questions"],
    ),
    ("startend:quotation", {}, ['"a"', ' "a "b" c"\n', '""'], ["a", '"', '"a', "“a”", "'a'"]),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["NASA and ESA", "I AM", "(OK),[OK]", "U.S. R2D2"],
        ["NASA-ESA", "NASA and Esa", "IT'S", "12 34"],  # a hyphen or an apostrophe does not end a word
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "less than"},
        ["NASA", "none"],
        ["NASA ESA"],
    ),
    ("change_case:english_capital", {}, [PROSE.upper()], [PROSE, GERMAN.upper(), "12 34"]),
    ("change_case:english_lowercase", {}, [PROSE.lower()], [PROSE, GERMAN.lower(), "12 34"]),
    ("punctuation:no_comma", {}, ["a; b"], ["a, b", ","]),
]


def test_every_published_instruction_has_cases() -> None:
    assert {kind for kind, *_ in CASES} == CHECKS.keys()
    assert len(CHECKS) == 25  # table 4 of the paper


@pytest.mark.parametrize(("kind", "arguments", "right", "wrong"), CASES)
def test_checks(kind: str, arguments: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    metadata = {"instruction_id_list": [kind], "kwargs": [arguments]}
    check_row({"id": "a", "prompt": "p", "answer": None, "metadata": metadata}, "f:1")
    assert [text for text in right if not follows(kind, arguments, text)] == []
    assert [text for text in [*wrong, "", " \n"] if follows(kind, arguments, text)] == []


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
