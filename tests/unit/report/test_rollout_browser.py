"""Tests of `brorl rollouts`: printing, filters, exports and one-line user errors."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_line import error_line, output
from made_run import group, rollout

from megatron_brorl import rollout_log
from megatron_brorl.rollout_log import GROUPS, ROLLOUTS, LogEntry

LAST = LogEntry("evaluation", 4)
# Answers to each prompt. A star marks a right one. None is a response without an answer.
ANSWERS = {"a": ["7*", "7*", "7*"], "b": ["1", "2*", "1"], "c": [None, "9", "9"]}


def group_rows(group: int, prompt: str, answers: list[str | None]) -> list[dict[str, object]]:
    """Return the rollouts of a group."""
    rows = []
    for i, answer in enumerate(answers):
        right = bool(answer) and answer.endswith("*")
        shown = answer.rstrip("*") if answer else None
        text = f"so [b]it[/b] is {shown}\x1b[31m" if shown else "I do not KNOW\nthat"
        columns = {"text": text, "finish": "stop" if shown else "length", "advantage": 0.25 if right else None}
        if right:
            turns = (("?\x1b", False, 0), (text, True, 0), ("new", False, 1))
            columns["turns"] = [dict(zip(("text", "sampled", "sequence"), turn, strict=True)) for turn in turns]
        rows.append(rollout(group, prompt, i, shown, right, **columns))
    return rows


RECORDED = {prompt: group_rows(g, prompt, answers) for g, (prompt, answers) in enumerate(ANSWERS.items())}


def write(folder, moment, groups, rollouts, ranks):
    rollout_log.write_groups(folder, moment, pa.Table.from_pylist(groups, GROUPS))
    for rank in range(ranks):
        rollout_log.write_rollouts(folder, moment, rank, pa.Table.from_pylist(rollouts[rank::ranks], ROLLOUTS))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Write evaluations 0 and 4 of three prompts by two ranks, and step 2 with one of two groups recorded."""
    run = tmp_path_factory.mktemp("run")
    folder = run / "rollouts"
    folder.mkdir()
    groups = [group(g, rollouts, recorded=3) for g, rollouts in enumerate(RECORDED.values())]
    for moment in (LogEntry("evaluation", 0), LAST):
        write(folder, moment, groups, [r for rollouts in RECORDED.values() for r in rollouts], ranks=2)
    first = group_rows(0, "t/0", ["1*", "1", "2"])
    second = group_rows(3, "t/3", ["8", "8", "8"])
    groups = [group(0, first, recorded=3, distinct=3), group(3, second, recorded=0)]
    write(folder, LogEntry("step", 2), groups, first, ranks=1)
    return run


@pytest.fixture
def ask(run, capsys):
    return lambda *options: output(capsys, "rollouts", run, *options).splitlines()


def test_prompts_of_the_last_evaluation(ask):
    assert ask() == [
        "right  answers  tokens  id  prompt",
        "0/3    2        3       c   what is c?",
        "1/3    2        3       b   what is b?",
        "3/3    1        3       a   what is a?",
        "evaluation 4: 3 of 3 prompts, 44.4% of their 9 rollouts right; 9 recorded rollouts",
        "recorded: step 3 and evaluations 0, 4",
    ]
    assert ask("--limit", 1)[1:3] == ["0/3    2        3       c   what is c?", "2 more: --limit 0 shows all"]


def test_groups_of_a_step(ask):
    assert ask("--step", 3)[:4] == [
        "right  answers  tokens  trained  id   prompt",
        "0/3    1        3       no       t/3  (not recorded)",
        "1/3    3        3       yes      t/0  what is t/0?",
        "step 3: 2 of 2 prompts, 16.7% of their 6 rollouts right; 3 recorded rollouts",
    ]


def test_one_prompt(ask):
    """Control characters are replaced."""
    assert ask("--prompt", "b") == [
        "evaluation 4, prompt b (exact): right 1 of 3, 2 distinct answers",
        *("", "what is", "b?", ""),
        *("reference answer: 7", ""),
        "rollouts  score  answer",
        "2         wrong  1",
        "1         right  2",
        "",
        "--- right (reward 1), sibling 1, 3 tokens, 1 turns, ended by itself, advantage +0.25, form 0.5",
        *("[environment]", "?\ufffd", "[model]"),
        "so [b]it[/b] is 2\ufffd[31m",
        *("[sequence 2]", "[environment]", "new"),
        "",
        "--- wrong (reward 0), sibling 0, 3 tokens, ended by itself, 1 is not it, form 0.5",
        "so [b]it[/b] is 1\ufffd[31m",
    ]
    assert ask("--prompt", "t/0")[0].startswith("step 3, prompt t/0 (exact): right 1 of 3")  # the moment that has it
    assert "1 right" in "".join(ask("--prompt", "t/0"))  # Answer 1 was scored right once and wrong once.


@pytest.mark.parametrize(
    ("options", "passing"),
    [
        (["--right"], "a0 a1 a2 b1"),
        (["--wrong"], "b0 b2 c0 c1 c2"),
        (["--mixed", "--wrong"], "b0 b2"),
        (["--contains", "know\nTHAT"], "c0"),
        (["--prompt", "c", "--contains", "is"], "c1 c2"),
    ],
)
def test_filters_and_exports(ask, tmp_path, options, passing):
    """Both export formats hold the rollouts that pass, as they were recorded."""
    expected_rows = [RECORDED[prompt][int(sibling)] for prompt, sibling in passing.split()]
    for ending in ("jsonl", "parquet"):
        path = tmp_path / f"x.{ending}"
        assert ask(*options, "--export", path) == [f"{len(expected_rows)} rollouts of evaluation 4 written to {path}"]
    lines = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    for line, row in zip(lines, expected_rows, strict=True):
        moment = {"kind": "evaluation", "number": 4, "task": "exact", "reference": "7"}
        assert line == {**moment, "prompt": f"what is\n{row['prompt_id']}?", **row, "parts": {"form": 0.5}}
    assert [row | {"parts": dict(row["parts"])} for row in pq.read_table(tmp_path / "x.parquet").to_pylist()] == lines


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--step", 7], ["no step 7 is recorded", "step 3 and evaluations 0, 4"]),
        (["--prompt", "bb"], ["prompt 'bb'", "the most similar id is b"]),
        (["--evaluation", 0, "--prompt", "t/0"], ["evaluation 0", "'t/0'", "filters"]),
        (["--limit", -1], ["--limit -1: must not be negative"]),
        (["--export", "x.txt"], ["x.txt: ", ".jsonl, .parquet"]),
        (["--contains", "absent", "--export", "x.jsonl"], ["x.jsonl: nothing to export"]),
        (["--export", "RUN/rollouts/x.jsonl"], ["/rollouts/x.jsonl", "write to another folder"]),
    ],
)
def test_user_errors_name_the_option_and_write_no_file(capsys, run, tmp_path, monkeypatch, options, parts):
    monkeypatch.chdir(tmp_path)
    line = error_line(capsys, "rollouts", run, *(str(o).replace("RUN", str(run)) for o in options))
    assert all(part in line for part in parts), line
    assert list(tmp_path.iterdir()) == []
