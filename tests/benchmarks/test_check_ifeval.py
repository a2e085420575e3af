"""Floors counted by hand, and invalid lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import check_ifeval
import pytest

INSTRUCTIONS = (
    (["punctuation:no_comma"], [{}]),
    (["startend:quotation", "detectable_format:number_bullet_lists"], [{"num_bullets": None}, {"num_bullets": 1}]),
)
PUBLISHED = [
    {"key": i, "prompt": "a", "instruction_id_list": names, "kwargs": kwargs}
    for i, (names, kwargs) in enumerate(INSTRUCTIONS)
]


def write(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def check(monkeypatch, capsys):
    """Run the tool and return exit code, stdout and stderr."""

    def run(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["check_ifeval.py", *map(str, args)])
        code = check_ifeval.main()
        return code, *capsys.readouterr()

    return run


def test_kinds_and_floors(check, tmp_path):
    published = write(tmp_path / "in.jsonl", PUBLISHED)
    code, out, _ = check(published)
    assert code == 0
    assert "2 prompts, 3 instructions of 3 kinds, all known" in out
    # For each mode, the mean share of instructions that are followed, and the share of prompts followed completely.
    assert "| x | 50.0% | 50.0% | 50.0% | 50.0% |" in out
    assert "| a letter in quotes | 75.0% | 50.0% | 75.0% | 50.0% |" in out
    assert "| everything at once | 100.0% | 100.0% | 100.0% | 100.0% |" in out
    assert "| x | 0.0% | 0.0% | 0.0% | 0.0% |" in check(published, "--min-words", 2)[1]


def test_invalid_lines_are_named(check, tmp_path):
    unknown = write(tmp_path / "u.jsonl", [*PUBLISHED, {**PUBLISHED[0], "instruction_id_list": ["punctuation:none"]}])
    code, _, err = check(unknown)
    assert code == 2
    assert f"{unknown}:3: metadata.instruction_id_list[0]: no instruction is called 'punctuation:none'" in err
    assert "no prompts" in check(write(tmp_path / "e.jsonl", []))[2]
    assert "no such data file" in check(tmp_path / "missing.jsonl")[2]
