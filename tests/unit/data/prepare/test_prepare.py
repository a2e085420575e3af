from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from megatron_brorl.cli.main import main
from megatron_brorl.data.prepare.card import data_card
from megatron_brorl.data.prepare.prepare import Job, prepare
from megatron_brorl.data.prompts import read_rows
from megatron_brorl.data.sets.table import SETS
from megatron_brorl.data.tokenizers import train_sentencepiece
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
    {"question": "Ed has 6 nuts. How many?", "answer": "#### "},
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    source = write(tmp_path / "train.jsonl", ROWS)
    test = write(tmp_path / "test.jsonl", [{"question": FRUIT.upper(), "answer": "#### 2"}, ROWS[6]])
    tokenizer = train_sentencepiece([str(row["question"]) for row in ROWS], tmp_path / "tokenizer", 64)
    return Job(
        "gsm8k",
        SETS["gsm8k"],
        [source],
        tmp_path / "out" / "gsm8k.jsonl",
        verifier="exact",
        instruction="Be brief.",
        tokenizer=tokenizer,
        max_prompt_tokens=100,
        evaluations=[("gsm8k", test)],
    )


def test_every_row_is_written_or_listed(job: Job) -> None:
    counts = prepare(job)
    source, test = job.inputs[0], job.evaluations[0][1]
    kept = lines(job.out)
    assert [(row["prompt"], row["answer"], row["verifier"]) for row in kept] == [
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
        (f"{source}:8", "no answer"),
    ]
    assert (dropped[2]["evaluation"], dropped[2]["shared"]) == (f"{test}:1", " ".join(FRUIT.split()[:13]))
    assert (dropped[4]["evaluation"], dropped[4]["shared"]) == (f"{test}:2", "di has 5 nuts. how many?")
    assert (counts.kept, counts.read, counts.dropped) == (
        2,
        Counter({source: 8}),
        Counter(row["reason"] for row in dropped),
    )
    rows, _ = read_rows(job.out, False)  # what a run makes of them
    assert [row.answer for row in rows] == ["2", "3"]
    assert len({row.id for row in rows}) == 2


def test_the_card_has_what_a_reader_can_check(job: Job) -> None:
    counts = prepare(job)
    card = data_card(job, counts, "brorl data prepare ...")
    for path in (job.inputs[0], job.out, job.evaluations[0][1]):
        assert f"`{hashlib.sha256(path.read_bytes()).hexdigest()}`" in card
    for row in (
        "| licence | MIT |",
        "| meant for | training |",
        "| read | 8 |",
        "| dropped: duplicate | 1 |",
        "| dropped: in an evaluation | 2 |",
        "| written | 2 |",
        f"| `{job.evaluations[0][1]}` | 2 | 2 |",
    ):
        assert row in card
    assert card == data_card(job, prepare(job), "brorl data prepare ...")  # no time of day, no random order


def test_parquet_and_jsonl_say_the_same(job: Job) -> None:
    prepare(job)
    other = Job("gsm8k", job.data_set, job.inputs, job.out.with_suffix(".parquet"), "exact", "Be brief.")
    prepare(other)
    table = pyarrow.parquet.read_table(other.out).to_pylist()
    assert table[:2] == [{**row, "metadata": "{}"} for row in lines(job.out)]
    assert len(table) == 5  # without length and decontamination
    assert [row.prompt for row in read_rows(other.out, False)[0]][:2] == [row["prompt"] for row in lines(job.out)]


def test_rows_of_this_project_keep_their_ids_and_instructions(tmp_path: Path) -> None:
    """A prepared file may be prepared again: decontaminated later, for example."""
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
    assert prepare(again).hits[0][0] == f"{job.out}:2"
    assert lines(again.out) == [rows[0]]


def test_mistakes_end_in_one_line_and_leave_nothing(job: Job, tmp_path: Path, capsys: Any) -> None:
    source = str(job.inputs[0])
    out = ["--out", str(tmp_path / "o.jsonl")]
    for arguments, message in (
        (["gsm9k", source, *out], "no data set is called 'gsm9k'; known: gsm8k, math500, "),
        (["gsm8k", source, "--out", source], "would replace an input"),
        (["gsm8k", source, "--out", str(tmp_path / "o.csv")], "unknown kind of data file; use .jsonl or .parquet"),
        (["gsm8k", f"{source}x", *out], "no such data file"),
        (["gsm8k", source, *out, "--prompt", "q"], "--prompt is of the set 'custom': 'gsm8k' knows its columns"),
        (["gsm8k", source, *out, "--licence", "x"], "--licence: that of 'gsm8k' is known: MIT"),
        (["custom", source, *out], "custom: give --prompt COLUMN"),
        (["gsm8k", source, *out, "--max-prompt-tokens", "9"], "--max-prompt-tokens N needs --tokenizer DIR"),
        (["gsm8k", source, *out, "--ngram", "0", "--decontaminate", source], "--ngram 0: must be at least 1"),
        (["gsm8k", source, *out, "--decontaminate", f"math500={source}"], "train.jsonl:1: there is no column"),
        (["math500", source, *out], "train.jsonl:1: there is no column 'problem', only 'question', 'answer'"),
        (
            ["gsm8k", source, *out, "--verifier", "exakt"],
            "--verifier: no verifier is called 'exakt'",
        ),
        (["gsm8k", source, *out, "--verifier", "exact", "--decontaminate", f"gsm8k={source}"], "in an evaluation: 7"),
    ):
        with pytest.raises(SystemExit) as e:
            main(["data", "prepare", *arguments])
        assert e.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith("brorl: ")
        assert error.count("\n") == 1
        assert message in error
    assert sorted(p.name for p in tmp_path.iterdir()) == ["test.jsonl", "tokenizer", "train.jsonl"]


def test_an_error_on_the_way_leaves_the_old_file(job: Job) -> None:
    prepare(job)
    before = job.out.read_bytes()
    with job.inputs[0].open("a") as file:
        file.write("{\n")
    with pytest.raises(UserError, match=r"train\.jsonl:9: not valid JSON"):
        prepare(job)
    assert job.out.read_bytes() == before
    assert sorted(p.name for p in job.out.parent.iterdir()) == ["gsm8k.dropped.jsonl", "gsm8k.jsonl"]


def test_the_command_in_full(job: Job, tmp_path: Path, capsys: Any) -> None:
    source, test = job.inputs[0], job.evaluations[0][1]
    out = tmp_path / "o.jsonl"
    options = ["--verifier", "exact", "--instruction", "", "--decontaminate", f"gsm8k={test}"]
    with pytest.raises(SystemExit) as e:
        main(["data", "prepare", "gsm8k", str(source), "--out", str(out), *options])
    assert e.value.code == 0
    assert capsys.readouterr().out.splitlines()[0] == f"{out}: 3 of 8 rows"
    assert [row["prompt"] for row in lines(out)][:1] == ["Ann has 2 nuts. How many?"]
    command = (tmp_path / "o.card.md").read_text().splitlines()[2]
    assert command == (
        f"`brorl data prepare gsm8k {source} --out {out} --verifier exact --instruction '' --ngram 13 "
        f"--decontaminate gsm8k={test}`"
    )
