"""Tests of `brorl config`, `brorl init`, and `brorl` without a command."""

from __future__ import annotations

import json
import re

import pytest
from command_line import error_line, output

from megatron_brorl import __version__
from megatron_brorl.config.load import keys, load
from megatron_brorl.config.schema import ColumnsConfig
from megatron_brorl.data.prompts import RowFormat, read_rows


def first_words(text):
    """Return the first words of the lines that start with a letter."""
    return [line.split(" ")[0] for line in text.splitlines() if line[:1].isalpha()]


def test_config_prints_one_key_a_section_or_all_keys(capsys):
    lines = ["", "[rollout]  Sampling of responses.", "rollout.n = 512   (integer, at least 1)"]
    assert output(capsys, "config", "rollout.n").split("\n") == [*lines, "    Rollouts per prompt.", ""]
    tasks = ["data.tasks", *(f"data.tasks[].{name}" for name in ("name", "weight", "prompt_regex", "config"))]
    assert first_words(output(capsys, "config", "data.tasks")) == tasks
    assert first_words(output(capsys, "config")) == list(keys())
    assert "optim.lr_for_rollouts" in output(capsys, "config", "for_rollouts")  # a part of a name
    assert json.loads(output(capsys, "config", "--schema"))["$defs"]["RolloutConfig"]["properties"]["n"]["minimum"] == 1
    assert error_line(capsys, "config", "num_generations").endswith("this trainer calls it rollout.n")


def test_version_help_and_unknown_commands(capsys):
    assert output(capsys, "--version") == f"brorl {__version__}\n"
    assert output(capsys).startswith("usage: brorl")
    assert "generate" in output(capsys, "data", code=2)
    assert re.fullmatch("brorl: .*'evalute'.* evaluate.*", error_line(capsys, "evalute", "run.toml", "rollout.n=4"))
    assert re.fullmatch("brorl: .*'x'.* train, .*", error_line(capsys, "x"))


def test_init_writes_what_load_reads(capsys, tmp_path):
    path, data, model = tmp_path / "own.toml", tmp_path / "gsm8k.jsonl", tmp_path / "model"
    data.write_text(json.dumps({"question": "1+1?", "answer": "One and one.\n#### 2"}) + "\n")
    model.mkdir()
    (model / "tokenizer_config.json").write_text('{"chat_template": null}')
    assert "\ndata.chat = false: " in output(capsys, "init", tmp_path / "plain.toml", "--model", model)
    assert load(tmp_path / "plain.toml").data.chat is False
    (model / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    text = output(capsys, "init", path, "--model", model, "--data", data, "--held-out", data)
    assert str(path) in text
    assert "\ndata.chat = true: " in text

    config = load(path)
    assert (config.model.path, config.data.train, config.data.chat) == (str(model), (str(data),), True)
    assert config.data.columns == ColumnsConfig(prompt="question", answer="answer", answer_regex="#### (.+)")
    assert f"# {keys()['rollout.n']['description']}\nn = 32\n" in path.read_text()
    assert f"{path}: exists; name another file" in error_line(capsys, "init", path)


def test_init_without_held_out_rows_or_answers(capsys, tmp_path):
    path, rows = tmp_path / "own.toml", tmp_path / "rows.jsonl"
    row = {"messages": [{"role": "user", "content": "1+1?"}], "level": "easy", "extra": {}}
    rows.write_text(json.dumps(row) + "\n")
    assert output(capsys, "init", path, "--data", rows).endswith(f"\nnext: brorl train --dry-run {path}\n")
    default, text = load(path), path.read_text()
    assert (default.data.held_out, default.data.verifier, default.data.chat) == ((), "my_reward.py:score", True)
    assert default.data.columns == ColumnsConfig(prompt="messages")
    assert 'row["columns"]: level, extra.' in text

    # A commented key is the default.
    commented = re.findall(r"^# (\w+ = .+)$", text, re.M)
    assert {"stop_strings = []", "temperature = 0.6", "top_p = 0.95"} <= set(commented)
    path.write_text(re.sub(r"(?m)^# (\w+ = )", r"\1", text))
    assert load(path) == default


@pytest.mark.parametrize("reward", ["rewards/own.py:score", "exact"])
def test_init_writes_the_given_reward(capsys, tmp_path, reward):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1?"}\n')
    output(capsys, "init", tmp_path / "own.toml", "--data", rows, "--reward", reward)
    assert load(tmp_path / "own.toml").data.verifier == reward
    assert "'maths'" in error_line(capsys, "init", tmp_path / "x", "--reward", "maths")
    assert not (tmp_path / "x").exists()


SIZES = {"pair": "31 or 4", "bigger": "31", "kind": "far", "gap": 27}


@pytest.mark.parametrize(
    ("row", "flags", "to_fill_in"),
    [
        (SIZES, "", ["data.verifier", "data.columns"]),
        (SIZES, "--prompt pair --answer bigger --task kind", []),
        (SIZES, "--prompt gap --answer bigger", ["data.columns"]),
        ({"messages": [{"role": "user", "content": "4?"}], "label": 4}, "", ["model.path"]),  # has no chat template
        ({"question": "Capital of Italy?", "answer": ["Rome", "Roma"]}, "", ["data.verifier"]),
        ({"problem": "x^2 = 9?", "solution": r"\boxed{3}, or \boxed{-3}"}, "", ["data.columns"]),
    ],
)
def test_init_names_the_keys_to_fill_in(capsys, tmp_path, row, flags, to_fill_in):
    rows, path = tmp_path / "rows.jsonl", tmp_path / "own.toml"
    rows.write_text(json.dumps(row) + "\n")
    assert f"{rows}:1: --task no" in error_line(capsys, "init", path, "--data", rows, "--task", "no")
    text = output(capsys, "init", path, "--data", rows, "--model", tmp_path, *flags.split())
    fill_in = "".join(line for line in text.splitlines() if line.startswith("fill in: "))
    assert re.findall(r"(?:: |; )([a-z]+\.[a-z]+) \(", fill_in) == to_fill_in
    assert path.read_text().count("# FILL IN: ") == len(to_fill_in)
    data = load(path).data
    if "data.columns" in to_fill_in:
        assert f"{rows}:1: " in fill_in
    else:  # The first row is valid with the other keys.
        read_rows(rows, RowFormat(data.verifier, columns=data.columns))


def test_each_configuration_has_its_own_run_dir(capsys, tmp_path, monkeypatch):
    """With a common run.dir, the second run would be refused or would continue the first one."""
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "runs/own", "deep/er"):
        (tmp_path / folder).mkdir(parents=True)
    expected = {
        "run.toml": "runs/run",
        "exp.v3.toml": "runs/exp.v3",
        "plain": "runs/plain",
        "a/run.toml": "runs/a/run",
        "./runs/../a/other.toml": "runs/a/other",
        "runs/own/run.toml": "runs/own/run",
        str(tmp_path / "deep/er/x.toml"): "runs/deep/er/x",
    }
    output(capsys, "init")  # run.toml
    assert str(tmp_path / "run.toml") in error_line(capsys, "init")
    for file in list(expected)[1:]:
        output(capsys, "init", file)
    assert {file: load(file).run.dir for file in expected} == expected
    assert load("run.toml").data.train == ("train.jsonl",)


@pytest.mark.parametrize("file", ["metrics.jsonl", "run.json", "checkpoints/step_00000001/run.json"])
def test_init_refuses_a_run_dir_that_contains_a_run(capsys, tmp_path, monkeypatch, file):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "x" / file).parent.mkdir(parents=True)
    (tmp_path / "runs" / "x" / file).write_text("")
    line = error_line(capsys, "init", "x.toml")
    assert all(place in line for place in ("runs/x", str(tmp_path / "x.toml")))
    assert not (tmp_path / "x.toml").exists()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")  # a file outside of the working directory contributes only its name
    output(capsys, "init", tmp_path / "x.toml")
    assert load(tmp_path / "x.toml").run.dir == "runs/x"
