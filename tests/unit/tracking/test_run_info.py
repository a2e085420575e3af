"""Test run.json, which records the starts of a run."""

from __future__ import annotations

import json
import shlex
import sys

import torch

from megatron_brorl.signals import LAUNCHER
from megatron_brorl.tracking import run_info


def test_a_resumed_run_has_two_starts(tmp_path):
    commands = ("brorl train a.toml", "brorl train a.toml rollout.n=8")
    run_info.write(tmp_path, {"rollout": {"n": 4}}, resume_step=None, command=commands[0], ranks=2, device="no GPU")
    run_info.write(tmp_path, {"rollout": {"n": 8}}, resume_step=3, command=commands[1], ranks=1, device="no GPU")
    record = json.loads((tmp_path / run_info.FILE).read_text())
    assert record["config"] == {"rollout": {"n": 8}}
    starts = [(s["step"], s["command"], s["ranks"]) for s in record["starts"]]
    assert starts == [(0, commands[0], 2), (3, commands[1], 1)]
    python, installed = (record["starts"][0]["versions"][name] for name in ("python", "torch"))
    assert (python, installed.split("+")[0]) == (sys.version.split()[0], torch.__version__.split("+")[0])

    # A new run in the same folder replaces the file.
    run_info.write(tmp_path, {}, resume_step=None, command="brorl train b.toml", ranks=1, device="no GPU")
    assert [s["command"] for s in run_info.read(tmp_path)["starts"]] == ["brorl train b.toml"]


def test_the_command_can_be_run_again(monkeypatch):
    monkeypatch.delenv(LAUNCHER, raising=False)
    arguments = ["train", "my runs/a.toml", 'data.template="{prompt} ="']
    assert shlex.split(run_info.command(arguments, ranks=2)) == ["brorl", *arguments]  # without torchrun
    monkeypatch.setenv(LAUNCHER, "17")
    assert run_info.command(["train", "a.toml"], ranks=2) == "brorl train --processes 2 a.toml"


def test_a_file_that_cannot_be_written_or_read_does_not_end_the_run(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    run_info.write(tmp_path / "file", {}, resume_step=None, command="brorl train a.toml", ranks=1, device="no GPU")
    assert "run.json: cannot be written: " in capsys.readouterr().err
    (tmp_path / run_info.FILE).write_text("[1, 2")
    assert run_info.read(tmp_path) == {}
