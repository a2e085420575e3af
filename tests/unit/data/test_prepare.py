from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from command_line import error_line, output
from tiny_tokenizer import train_sentencepiece

from megatron_brorl.data.prepare import Contamination, Job, normalized, prepare
from megatron_brorl.data.prompts import read_rows
from megatron_brorl.data.published_sets import SETS
from megatron_brorl.errors import UserError

FRUIT = "ann has three red apples and gives one of them to bo so how many are left"
ROWS = [
    {"question": "Ann has 2 nuts. How many?", "answer": "#### 2"},
    {"question": "Bo has 3 nuts. How many?", "answer": "#### 3"},
    {"question": "ann has  2 nuts. How many?", "answer": "So\n#### 2"},
    {"question": "Bo has 3 nuts. How many?", "answer": "#### 4"},
    {"question": f"Listen: {FRUIT}?", "answer": "#### 2"},
    {"question": "Cy has 4 nuts. " * 20, "answer": "#### 4"},
    {"question": "Di has 5 nuts. How many?", "answer": "#### 5"},
    {"question": "Ed has 6 nuts. How many?", "answer": "6"},
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def job(tmp_path):
    source = write(tmp_path / "train.jsonl", ROWS)
    test = write(tmp_path / "test.jsonl", [{"question": FRUIT.upper(), "answer": "#### 2"}, ROWS[6]])
    tokenizer = train_sentencepiece([str(row["question"]) for row in ROWS], tmp_path / "tokenizer", 64)
    options = {"verifier": "exact", "instruction": "Be brief.", "tokenizer": tokenizer, "max_prompt_tokens": 100}
    out = tmp_path / "out" / "gsm8k.jsonl"
    return Job("gsm8k", SETS["gsm8k"], [source], out, evaluations=[("gsm8k", test)], **options)


def test_every_row_is_written_or_listed(job):
    counts = prepare(job)
    source, test = job.inputs[0], job.evaluations[0][1]
    assert [(row["prompt"], row["answer"], row["verifier"]) for row in lines(job.out)] == [
        ("Ann has 2 nuts. How many?\n\nBe brief.", "2", "exact"),
        ("Bo has 3 nuts. How many?\n\nBe brief.", "3", "exact"),
    ]
    dropped = lines(job.dropped)
    assert [(row["where"], row["reason"]) for row in dropped] == [
        (f"{source}:3", "duplicate"),
        (f"{source}:4", "duplicate with another answer"),
        (f"{source}:5", "in an evaluation"),
        (f"{source}:6", "longer than 100 tokens"),
        (f"{source}:7", "in an evaluation"),
        (f"{source}:8", "refused"),
    ]
    assert dropped[2]["detail"] == f"{test}:1: {' '.join(FRUIT.split()[:13])}"
    assert dropped[4]["detail"] == f"{test}:2: = di has 5 nuts. how many?"
    assert (counts.kept, counts.read) == (2, Counter({source: 8}))
    assert counts.dropped == Counter(row["reason"] for row in dropped)
    assert [row.answer for row in read_rows(job.out)] == ["2", "3"]

    # The card lists hashes and counts that a reader can check. A second call must write the same card.
    card = job.card.read_text()
    for path in (source, job.out, test):
        assert hashlib.sha256(path.read_bytes()).hexdigest() in card
    for text in ("licence: MIT", "Use: training", "8 rows", "Dropped, duplicate: 1 rows", "Written: 2 rows"):
        assert text in card
    prepare(job)
    assert job.card.read_text() == card


def test_rows_of_this_project_keep_their_ids_and_instructions(tmp_path):
    """A prepared file may be prepared again."""
    rows = [
        {"id": "a", "prompt": "Find x.\n\nLet's think step by step and output the final answer within \\boxed{}."},
        {"prompt": [{"role": "user", "content": "Find y."}], "verifier": "exact", "answer": "2"},
    ]
    rows[0] |= {"answer": "1", "metadata": {"m": [1]}, "verifier": "exact"}
    job = Job("rows", SETS["rows"], [write(tmp_path / "f.jsonl", rows)], tmp_path / "o.jsonl", instruction="Now.")
    prepare(job)
    first, second = lines(job.out)
    assert first == rows[0]
    assert second["prompt"] == rows[1]["prompt"]
    assert second["id"].startswith("rows:")
    evaluation = write(tmp_path / "e.jsonl", [{"prompt": "FIND Y.", "answer": "2"}])
    again = Job("rows", SETS["rows"], [job.out], tmp_path / "p.jsonl", evaluations=[("rows", evaluation)])
    assert prepare(again).dropped == {"in an evaluation": 1}
    assert lines(again.out) == [rows[0]]


def test_mistakes_are_errors_of_one_line_and_write_no_file(job, tmp_path, capsys):
    source = str(job.inputs[0])
    out = ["--out", str(tmp_path / "o.jsonl")]
    for arguments, named in (
        (["gsm9k", source, *out], "'gsm9k'; known: gsm8k, math500, "),
        (["gsm8k", source, "--out", source], "would replace an input"),
        (["custom", source, *out], "--prompt COLUMN is missing"),
        (["math500", source, *out], "is it a file of the set 'math500'"),
    ):
        assert named in error_line(capsys, "data", "prepare", *arguments)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["test.jsonl", "tokenizer", "train.jsonl"]


def test_an_error_keeps_the_old_file(job):
    prepare(job)
    before = job.out.read_bytes()
    with job.inputs[0].open("a") as file:
        file.write("{\n")
    with pytest.raises(UserError, match="not valid JSON"):
        prepare(job)
    assert job.out.read_bytes() == before
    assert sorted(p.suffix for p in job.out.parent.iterdir()) == [".jsonl", ".jsonl", ".md"]


def test_normalization_keeps_signs():
    assert normalized(" What  is\n2 + 3?") == "what is 2 + 3?"
    assert normalized("\uff12 \u212b STRASSE") == normalized("2 \u00e5 stra\u00dfe")
    assert normalized("2+3") != normalized("2-3")


@pytest.mark.parametrize("n", [1, 2, 4])
def test_shared_words_by_brute_force(n):
    draw = random.Random(n)
    texts = ["".join(draw.choices("abcde", k=draw.randrange(0, 9))) for _ in range(160)]  # each letter is a word
    evaluation, training = texts[:12], texts[12:]
    contamination = Contamination(n)
    for i, text in enumerate(evaluation):
        contamination.add(" ".join(text), f"e:{i}")
    for text in training:
        runs = [text[j : j + n] for j in range(len(text) - n + 1)]
        matches = [(run, i) for run in runs for i, other in enumerate(evaluation) if run in other]
        expected = "".join(f"e:{i}: {' '.join(run)}" for run, i in matches[:1])
        if len(text) < n and text in evaluation:
            expected = f"e:{evaluation.index(text)}: = {' '.join(text)}"
        assert contamination.find(" ".join(text)) == expected


@pytest.mark.parametrize("verifier", ["math", "exact"])
def test_references_of_letters_that_are_text_are_counted(tmp_path, capsys, verifier):
    answers = ["XI", "7", "x, CAB", "4CA", "so \\boxed{NE}", "ab", "V = IR", "the answer is tea", "2\\pi"]
    source = write(tmp_path / "f.jsonl", [{"q": f"{i}?", "a": answer} for i, answer in enumerate(answers)])
    options = f"--prompt q --answer a --out {tmp_path / 'o.jsonl'} --verifier {verifier}"
    text = output(capsys, "data", "prepare", "custom", source, *options.split())
    line = "\n  4 rows: verifier math compares letters of the answer as text"  # XI, CAB, NE and tea
    assert (line in text) == (verifier == "math")
