"""Tests of the commands in README and docs: cheap ones are run, the others are checked without running them."""

from __future__ import annotations

import json
import re
import runpy
from unittest.mock import Mock

import pytest
from doc_commands import PAGES, ROOT, arguments_of_brorl, commands, fault

from megatron_brorl.cli.main import main

ALL = [c for page in PAGES for c in commands(str(page.relative_to(ROOT)), page.read_text())]
BLOCKS = [c for c in ALL if not c.inline]


def is_run(command) -> bool:
    """Return whether test_cheap_commands_run runs a command."""
    if command.stdin or (command.words[0] == "python" and command.words[1].startswith("runs/")):
        return command.reasons is None
    arguments = arguments_of_brorl(command.words) or [""]
    cheap = arguments[0] in ("config", "metrics", "init", "compare") or arguments[:3] == ["data", "prepare", "gsm8k"]
    return cheap and not command.inline and "the network" not in (command.reasons or ())


@pytest.fixture
def toml(tmp_path):
    path = tmp_path / "standing.toml"
    path.write_text('[data]\ntrain = ["rows.jsonl"]\nheld_out = ["held_out.jsonl"]\n')
    return path


def test_documented_commands_are_valid(toml):
    assert len(BLOCKS) > 60
    assert [f"{c}: {why}" for c in ALL if (why := fault(c, toml))] == []


def test_cheap_commands_run(tmp_path, monkeypatch, capsys):
    """Run the cheap commands in a folder with the files that they name."""
    monkeypatch.chdir(tmp_path)
    problem = {"question": "Two and five?", "answer": "2 + 5 = 7\n#### 7"}
    for name in ("problems", "train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({**problem, "question": f"{name}: 2 and 5?"}) + "\n")
    for i, folder in enumerate(("a", "b", "tutorial/before", "tutorial/after")):
        (tmp_path / "runs" / folder).mkdir(parents=True)
        rows = [{"id": p, "task": "t", "samples": 4, "right": 1 + i, "reward": 0.5, "tokens": 9.0} for p in "xyz"]
        lines = "".join(json.dumps({"benchmark": "own", **row}) + "\n" for row in rows)
        (tmp_path / "runs" / folder / "evaluation.jsonl").write_text(lines)
        (tmp_path / "runs" / folder / "evaluation.json").write_text("{}")
    (tmp_path / "DIR").mkdir()
    (tmp_path / "runs" / "own").mkdir()

    run = [c for c in BLOCKS if is_run(c)]
    kinds = {(arguments_of_brorl(c.words) or c.words)[0] for c in run}
    assert kinds == {"config", "metrics", "init", "compare", "data", "python", "cat"}
    for command in run:
        if command.words[0] == "cat":
            (tmp_path / command.words[1]).write_text(command.stdin)
        elif command.stdin:
            exec(compile(command.stdin, command.where, "exec"), {"__name__": "__main__"})
        elif command.words[0] == "python":  # its output is written next to it
            capsys.readouterr()
            namespace = runpy.run_path(command.words[1], run_name="__main__")
            (tmp_path / command.words[1]).with_name("rows.jsonl").write_text(capsys.readouterr().out)
            assert [namespace["score"](text, {"prompt": "7="}) for text in ("3+4", "3+5", "7")] == [1.0, 0.2, 0.0]
        else:
            (tmp_path / "run.toml").unlink(missing_ok=True)  # init does not overwrite a file
            with pytest.raises(SystemExit) as ended:
                main(arguments_of_brorl(command.words))
            assert ended.value.code == 0, f"{command}: {capsys.readouterr().err}"


def test_reward_of_readme_compares_whole_answers(monkeypatch):
    """A reward that searches for the answer in the response would accept 15 for 5."""
    monkeypatch.setattr("megatron_brorl.train", train := Mock())
    (example,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)
    exec(compile(example, "README.md", "exec"), {})
    reward = train.call_args.kwargs["reward"]
    assert [reward(text, {"answer": "5"}) for text in ("5", " 5\n", "15", "5.5")] == [1.0, 1.0, 0.0, 0.0]
