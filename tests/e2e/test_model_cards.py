"""The model cards that `brorl train` and `brorl sft` write."""

from __future__ import annotations

import json
import shutil
import time

import pytest
import yaml
from e2e.runs import brorl

STEPS = ["train.steps=1", "rollout.prompts=2", "rollout.n=16", "evaluate.every=0"]


def card(run_dir) -> tuple[dict, str]:
    """Return metadata and body of the exported model's card."""
    _, front, body = (run_dir / "model" / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), body


@pytest.fixture(scope="module")
def base(warm, tmp_path_factory):
    """The warm start with a card as a model of the hub has it."""
    directory = shutil.copytree(warm, tmp_path_factory.mktemp("base") / "small")
    (directory / "README.md").write_text("---\nlicense: llama3\nbase_model: them/large\n---\n# Small\nIts own words.\n")
    return directory


def test_figures_are_those_of_the_summary_and_the_date_is_the_runs(config, base, tmp_path):
    run = tmp_path / "run"
    command = ["train", config, f"model.path={base}", f"run.dir={run}", *STEPS]
    begun = time.gmtime()
    done = brorl(*command)
    assert done.returncode == 0, done.stderr
    front, body = card(run)
    assert (front["license"], front["base_model"]) == ("llama3", "them/large")
    assert "Its own words" not in body
    assert (
        f"| `held_out.jsonl` | `data.held_out` | {json.loads((run / 'summary.json').read_text())['held_out_prompts']} |"
        in body
    )

    # Every figure, to its last digit.
    summary = json.loads((run / "summary.json").read_text())
    both = [summary["pass_at_1_before"], summary["pass_at_1_after"]]
    shown = " | ".join(f"{p['mean']:.4f} ({p['low']:.4f} to {p['high']:.4f})" for p in both)
    assert f"| pass@1 (95% interval) | {shown} |" in body
    assert f"| pass@2 | {summary['pass_at_2_before']:.4f} | {summary['pass_at_2_after']:.4f} |" in body

    # Written again by another process, today: the day that the run began is in its checkpoint.
    days = {time.strftime("%Y-%m-%d", at) for at in (begun, time.gmtime())}
    assert any(f"| began | {day} (UTC) |" in body for day in days)
    written = (run / "model" / "README.md").read_bytes()
    shutil.rmtree(run / "model")  # with the model there, the run says that it has finished
    assert brorl(*command).returncode == 0
    assert (run / "model" / "README.md").read_bytes() == written


def test_a_run_without_evaluation_has_no_figures(config, base, tmp_path):
    done = brorl("train", config, f"model.path={base}", f"run.dir={tmp_path}", "data.held_out=[]", *STEPS)
    assert done.returncode == 0, done.stderr
    front, body = card(tmp_path)
    assert front["license"] == "llama3"
    assert "No held-out prompts were evaluated in this run" in body
    assert json.loads((tmp_path / "summary.json").read_text())["after"] is None


def test_supervised_training_has_a_card_too(warm):
    front, body = card(warm.parent)
    assert front == {
        "license": "other",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["megatron-brorl", "sft"],
    }
    assert "| examples per step | 64 |" in body
    assert "scored by" not in body
