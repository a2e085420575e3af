"""The model cards that `brorl train` and `brorl sft` write."""

from __future__ import annotations

import json
import shutil
import time

import yaml
from e2e.runs import brorl

STEPS = ["train.steps=1", "rollout.prompts=2", "rollout.n=16", "evaluate.every=0"]


def card(run_dir) -> tuple[dict, str]:
    """Return metadata and body of the exported model's card."""
    _, front, body = (run_dir / "model" / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), body


def test_metrics_equal_the_summary_and_the_date_is_that_of_the_first_start(config, warm, tmp_path):
    base = shutil.copytree(warm, tmp_path / "small")
    (base / "README.md").write_text("---\nlicense: llama3\nbase_model: them/large\n---\n# Small\nIts own words.\n")
    run = tmp_path / "run"
    command = ["train", config, f"model.path={base}", f"run.dir={run}", *STEPS]
    begun = time.gmtime()
    done = brorl(*command)
    assert done.returncode == 0, done.stderr
    front, body = card(run)
    assert (front["license"], front["base_model"]) == ("llama3", "them/large")
    assert "Its own words" not in body
    summary = json.loads((run / "summary.json").read_text())
    assert f"| `held_out.jsonl` | `data.held_out` | {summary['held_out_prompts']} |" in body
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
