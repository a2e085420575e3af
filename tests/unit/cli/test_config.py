"""Tests of `brorl config`, `brorl init`, and `brorl` without a command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_brorl import __version__
from megatron_brorl.cli.main import main
from megatron_brorl.config.load import load
from megatron_brorl.config.schema import ColumnsConfig, keys
from megatron_brorl.data.prompts import RowFormat, read_rows


def said(capsys, *arguments, code=0):
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    assert ended.value.code == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def test_config_prints_one_key_a_section_or_all_keys(capsys):
    assert said(capsys, "config", "rollout.n").split("\n") == [
        "",
        "[rollout]  Sampling of responses.",
        "rollout.n = 512   (integer, at least 1)",
        "    Rollouts per prompt.",
        "",
    ]
    section = said(capsys, "config", "data.tasks")
    assert [line.split(" ")[0] for line in section.splitlines() if line.startswith("data.")] == [
        "data.tasks",
        *(f"data.tasks[].{name}" for name in ("name", "weight", "prompt_regex", "config")),
    ]
    everything = said(capsys, "config")
    assert [line.split(" ")[0] for line in everything.splitlines() if line[:1].isalpha()] == list(keys())
    assert "optim.lr_for_rollouts" in said(capsys, "config", "for_rollouts")  # a part of a name
    assert json.loads(said(capsys, "config", "--schema"))["$defs"]["RolloutConfig"]["properties"]["n"]["minimum"] == 1


def test_an_unknown_key_is_answered_with_a_suggestion(capsys):
    assert said(capsys, "config", "num_generations", code=2) == (
        "brorl: no key is called 'num_generations'; this trainer calls it rollout.n\n"
    )


def test_version_and_help_without_a_command(capsys):
    assert said(capsys, "--version") == f"brorl {__version__}\n"
    shown = said(capsys)
    assert shown.startswith("usage: brorl")
    assert "train by reinforcement learning" in shown
    assert "generate" in said(capsys, "data", code=2)
    assert re.fullmatch("brorl: .*'evalute'.* evaluate.*\n", said(capsys, "evalute", "run.toml", "rollout.n=4", code=2))
    assert re.fullmatch("brorl: .*'x'.* train, .*\n", said(capsys, "x", code=2))


def test_init_writes_what_load_reads(capsys, tmp_path):
    path = tmp_path / "own.toml"
    data = tmp_path / "gsm8k.jsonl"
    model = tmp_path / "model"
    data.write_text(json.dumps({"question": "1+1?", "answer": "One and one.\n#### 2"}) + "\n")
    model.mkdir()
    (model / "tokenizer_config.json").write_text('{"chat_template": null}')
    assert "\ndata.chat = false: " in said(capsys, "init", tmp_path / "plain.toml", "--model", model)
    (model / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    told = said(capsys, "init", path, "--model", model, "--data", data, "--held-out", data)
    assert str(path) in told
    assert "\ndata.chat = true: " in told
    assert load(tmp_path / "plain.toml").data.chat is False

    config = load(path)
    assert (config.model.path, config.data.train, config.data.chat) == (str(model), (str(data),), True)
    assert config.data.columns == ColumnsConfig(prompt="question", answer="answer", answer_regex="#### (.+)")

    assert f"# {keys()['rollout.n']['description']}\nn = 32\n" in path.read_text()
    assert f"{path}: exists; name another file" in said(capsys, "init", path, code=2)


def commented(path):
    """Return the lines of a configuration that are commented keys, uncommented."""
    lines = path.read_text().splitlines()
    return {line[2:] for line in lines if re.fullmatch(r"# \w+ = .+", line)}


def test_init_without_held_out_rows_or_answers(capsys, tmp_path):
    path = tmp_path / "own.toml"
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        json.dumps({"messages": [{"role": "user", "content": "1+1?"}], "level": "easy", "extra": {}}) + "\n"
    )
    told = said(capsys, "init", path, "--data", rows)
    assert told.endswith(f"\nnext: brorl train --dry-run {path}\n")
    data = load(path).data
    assert (data.held_out, data.verifier, data.chat) == ((), "my_reward.py:score", True)
    assert data.columns == ColumnsConfig(prompt="messages")
    assert 'row["columns"]: level, extra.' in path.read_text()
    assert {"stop_strings = []", "temperature = 0.6", "top_p = 0.95"} <= commented(path)

    # A commented key is the default.
    default = load(path)
    path.write_text(re.sub(r"(?m)^# (\w+ = )", r"\1", path.read_text()))
    assert load(path) == default


@pytest.mark.parametrize("reward", ["rewards/own.py:score", "exact"])
def test_init_writes_the_given_reward(capsys, tmp_path, reward):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1?"}\n')
    said(capsys, "init", tmp_path / "own.toml", "--data", rows, "--reward", reward)
    assert load(tmp_path / "own.toml").data.verifier == reward
    assert "--reward: no verifier is called 'maths'" in said(
        capsys, "init", tmp_path / "x", "--reward", "maths", code=2
    )
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
def test_init_says_which_keys_to_fill_in(capsys, tmp_path, row, flags, to_fill_in):
    rows, path = tmp_path / "rows.jsonl", tmp_path / "own.toml"
    rows.write_text(json.dumps(row) + "\n")
    assert f"{rows}:1: --task no" in said(capsys, "init", path, "--data", rows, "--task", "no", code=2)
    told = said(capsys, "init", path, "--data", rows, "--model", tmp_path, *flags.split())
    fill_in = "".join(line for line in told.splitlines() if line.startswith("fill in: "))
    assert re.findall(r"(?:: |; )([a-z]+\.[a-z]+) \(", fill_in) == to_fill_in
    assert path.read_text().count("# FILL IN: ") == len(to_fill_in)
    data = load(path).data
    if "data.columns" in to_fill_in:
        assert f"{rows}:1: " in fill_in
    else:  # The first row is valid with the other keys.
        read_rows(rows, RowFormat(data.verifier, columns=data.columns))


def test_each_configuration_gets_its_own_run_dir(capsys, tmp_path, monkeypatch):
    """With a common run.dir, the second run would be refused or would continue the first one."""
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b", "runs/own", "deep/er"):
        (tmp_path / folder).mkdir(parents=True)
    expected = {
        "run.toml": "runs/run",
        "exp1.toml": "runs/exp1",
        "exp 2.toml": "runs/exp 2",
        "exp.v3.toml": "runs/exp.v3",
        "plain": "runs/plain",
        "a/run.toml": "runs/a/run",
        "b/run.toml": "runs/b/run",
        "./b/../a/other.toml": "runs/a/other",
        "runs/own/run.toml": "runs/own/run",
        str(tmp_path / "deep/er/x.toml"): "runs/deep/er/x",
    }
    for file in expected:
        said(capsys, "init", file)
    assert {file: load(file).run.dir for file in expected} == expected
    assert len(set(expected.values())) == len(expected)


@pytest.mark.parametrize("what", ["metrics.jsonl", "run.json", "checkpoints/step_00000001/run.json"])
def test_init_refuses_a_run_dir_that_contains_a_run(capsys, tmp_path, monkeypatch, what):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "x" / what).parent.mkdir(parents=True)
    (tmp_path / "runs" / "x" / what).write_text("")
    told = said(capsys, "init", "x.toml", code=2)
    assert "runs/x" in told
    assert str(tmp_path / "x.toml") in told
    assert not (tmp_path / "x.toml").exists()
    (tmp_path / "other").mkdir()
    elsewhere = tmp_path / "other"
    monkeypatch.chdir(elsewhere)  # a file outside of the working directory contributes only its name
    said(capsys, "init", tmp_path / "x.toml")
    assert load(tmp_path / "x.toml").run.dir == "runs/x"


def test_init_without_options_writes_a_valid_configuration(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said(capsys, "init")
    assert load("run.toml").data.train == ("train.jsonl",)
    assert str(Path("run.toml").absolute()) in said(capsys, "init", code=2)
