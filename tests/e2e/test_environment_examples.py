"""Two steps of the examples with environments. Every recorded rollout is replayed in the environment."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import forks
from e2e.runs import REPOSITORY, brorl, rows

from megatron_brorl import load_run

SMALL = ["sft.steps=60", "train.steps=2", "rollout.n=8", "rollout.prompts=6", "evaluate.every=2", "evaluate.samples=1"]


def run(folder: Path, name: str) -> list[dict[str, Any]]:
    """Run an example on two ranks with small sizes; return the recorded rollouts of the last step."""
    shutil.copytree(REPOSITORY / "examples" / name, folder / "examples" / name)
    config = f"examples/{name}/{name}.toml"
    data = forks.script(folder / "examples" / name / "make_data.py", f"runs/{name}/data", cwd=folder)
    assert data.returncode == 0, data.stderr
    held_out = folder / "runs" / name / "data" / "held_out.jsonl"
    held_out.write_text("".join(held_out.read_text().splitlines(keepends=True)[:8]))
    model = forks.script(REPOSITORY / "tools" / "make_tiny_model.py", config, "init", "--vocab", 140, cwd=folder)
    assert model.returncode == 0, model.stderr
    for command, start, directory in (("sft", "init", "sft"), ("train", "sft/model", "run")):
        options = [f"model.path={start}", f"run.dir={directory}", *SMALL]
        done = brorl(command, "--processes", 2, config, *options, cwd=folder)
        assert done.returncode == 0, done.stderr
    lines = rows(folder / "run")
    assert len(lines) == 2
    assert max(line["turns"] for line in lines) > 1
    found = load_run(folder / "run")
    references = {g["group"]: g["reference"] for g in found.groups(1).to_pylist()}
    return [{**r, "reference": references[r["group"]]} for r in found.rollouts(1).to_pylist()]


def texts(rollout: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the turns of the model and the observations."""
    return tuple([t["text"] for t in rollout["turns"] if t["sampled"] is flag] for flag in (True, False))


def test_guessing(tmp_path, monkeypatch):
    rollouts = run(tmp_path, "guessing")
    monkeypatch.syspath_prepend(REPOSITORY / "examples" / "guessing")
    monkeypatch.delitem(sys.modules, "guess", raising=False)
    environment = importlib.import_module("guess").Guess()
    assert max(len(texts(r)[0]) for r in rollouts) > 2
    for rollout in rollouts:
        turns, observations = texts(rollout)
        environment.reset({"answer": rollout["reference"]})
        replayed = [environment.step(turn) for turn in turns]
        assert observations == [observation for observation, _ in replayed[: len(observations)]]
        assert not any(done for _, done in replayed[:-1])
        assert rollout["reward"] == environment.reward()
        assert len(turns) <= 6


def test_calculator(tmp_path):
    rollouts = run(tmp_path, "calculator")
    calls = 0
    for rollout in rollouts:
        turns, observations = texts(rollout)
        for turn, observation in zip(turns, observations, strict=False):
            product = re.fullmatch(r"<call>calculate: (\d{1,4})\*(\d{1,4})</call>", turn)
            if product and not re.match("0[0-9]", product[1]) and not re.match("0[0-9]", product[2]):
                calls += 1
                assert observation == f"<result>{int(product[1]) * int(product[2])}</result>"
        numbers = re.findall(r"\d+", turns[-1])
        if rollout["reward"]:
            assert int(numbers[-1]) == int(rollout["reference"])
    assert calls
