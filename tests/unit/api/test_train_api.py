"""Test `megatron_brorl.train` with a reward function and callbacks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tiny
from unit.data.test_tokenizers import make_hf

from megatron_brorl import StopTraining, UserError, load_run, train

PAGE = Path(__file__).parents[3] / "docs" / "python.md"
ROWS = [{"prompt": f"{a} + {b} =", "answer": str((a + b) % 10)} for a in range(3) for b in range(3)]


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Return the configuration of a run of two steps."""
    folder = tmp_path_factory.mktemp("train_api")
    tiny.make_model(folder / "model", "qwen2", tied=True, vocab_size=304, bos_token_id=0, eos_token_id=1)
    make_hf(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return {
        "model": {"path": folder / "model"},
        "data": {"train": [str(folder / "rows.jsonl")], "held_out": [str(folder / "rows.jsonl")]},
        "rollout": {"n": 16, "prompts": 2, "max_tokens": 4},
        "reward": {"workers": 1, "cut_off_factor": 1.0},
        "train": {"steps": 2, "tokens_per_micro_batch": 256},
        "evaluate": {"samples": 2},
        "run": {"log": []},
    }


def even(response, row):
    """Reward texts of even length, so that an untrained model is sometimes correct."""
    assert row["answer"] is not None
    return float(len(response) % 2 == 0)


class Recorder:
    """A callback that stores its arguments, and raises `raised` after the first step."""

    def __init__(self, raised=None):
        self.steps, self.evaluations, self.summaries, self.raised = [], [], [], raised

    def on_step(self, step, metrics):
        self.steps.append((step, dict(metrics)))
        if self.raised:
            raise self.raised

    def on_evaluation(self, step, results, samples):
        self.evaluations.append((step, results, samples))

    def on_end(self, summary):
        self.summaries.append(summary)


@pytest.fixture(scope="module")
def uninterrupted(tables, tmp_path_factory):
    directory, recorder = tmp_path_factory.mktemp("uninterrupted"), Recorder()
    return train(tables, overrides=[f"run.dir={directory}"], reward=even, callbacks=[recorder]), recorder


def without_time(rows):
    return [{k: v for k, v in row.items() if k != "time"} for row in rows]


def test_callbacks_receive_the_recorded_metrics(uninterrupted):
    result, recorder = uninterrupted
    assert result.finished
    # Rewards computed from the recorded texts.
    for step, metrics in recorder.steps:
        texts = result.rollouts(step)["text"].to_pylist()
        assert len(texts) == 2 * 16
        assert metrics["reward"] == pytest.approx(sum(len(t.strip()) % 2 == 0 for t in texts) / len(texts))
        assert result.metrics[step]["reward"] == metrics["reward"]
    assert [step for step, _ in recorder.steps] == [0, 1]
    assert [step for step, _, _ in recorder.evaluations] == [0, 2]
    for _, results, samples in recorder.evaluations:
        assert results["pass_at_1"]["mean"] == pytest.approx(sum(samples["right"].to_pylist()) / (2 * len(ROWS)))
    assert recorder.summaries[0]["steps"] == result.summary["steps"] == 2
    assert load_run(result.directory).metrics == result.metrics
    with pytest.raises(UserError, match="nothing is recorded of step 7"):
        result.rollouts(7)


def test_a_finished_run_is_returned_without_training(tables, tmp_path, capfd):
    one_step = {**tables, "train": {**tables["train"], "steps": 1}, "run": {"log": [], "dir": str(tmp_path)}}
    first = train(one_step)
    weights = tmp_path / "model" / "model.safetensors"
    written_at = weights.stat().st_mtime_ns
    capfd.readouterr()
    again = train(one_step)
    assert (again.finished, again.summary, again.metrics) == (True, first.summary, first.metrics)
    stdout, stderr = capfd.readouterr()
    assert (stdout, stderr.count("\n")) == ("", 1)
    assert stderr.startswith(f"run.dir = {tmp_path}: this run has finished (steps: 1;")
    # Changed values would have no effect, because no step is left.
    with pytest.raises(UserError, match=r"rollout\.n = \d+ -> 6, optim\.lr = \S+ -> 0\.5; run\.dir=OTHER"):
        train(one_step, overrides=["rollout.n=6", "optim.lr=0.5"])
    assert weights.stat().st_mtime_ns == written_at
    assert json.loads((tmp_path / "summary.json").read_text()) == first.summary
    longer = train(one_step, overrides=["train.steps=2"])
    assert (longer.metrics[:1], longer.summary["steps"], len(longer.metrics)) == (first.metrics, 2, 2)


def test_the_example_of_the_documentation_runs(uninterrupted, tables, tmp_path, monkeypatch):
    """Run the example of docs/python.md and check its values."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "x").symlink_to(uninterrupted[0].directory)
    sections = {**tables, "model": {"path": str(tables["model"]["path"])}}
    with open(tmp_path / "run.toml", "w") as file:
        for name, section in sections.items():
            file.write(f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in section.items()))
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    names = {}
    exec(compile(code, str(PAGE), "exec"), names)

    samples, rewards = names["groups"][0], names["rewards"][0]
    assert [r.reward for r in rewards] == [float(s.text.strip() == "19") for s in samples]
    assert len(samples) == 64
    assert names["run"].finished
    assert len(names["run"].metrics) == 20
    rollouts = uninterrupted[0].rollouts(1).to_pylist()
    assert names["wrong"] == [r["text"] for r in rollouts if not r["right"]]
    assert 0 < len(names["wrong"]) < len(rollouts)


@pytest.mark.parametrize("raised", [StopTraining(), ValueError("plot\nfailed")])
def test_stopped_runs_resume_bit_exactly(uninterrupted, tables, tmp_path, raised):
    options = {"overrides": [f"run.dir={tmp_path}"], "reward": even}
    if isinstance(raised, StopTraining):
        stopped = train(tables, callbacks=[Recorder(raised)], **options)
        assert (stopped.finished, stopped.summary, len(stopped.metrics)) == (False, None, 1)
    else:
        message = "callback Recorder.on_step: ValueError: plot failed; the state after 1 step is saved"
        with pytest.raises(UserError, match=message):
            train(tables, callbacks=[Recorder(raised)], **options)
        with pytest.raises(UserError, match="was written with another version of this_process"):
            train(tables, overrides=options["overrides"], reward=lambda response, row: 0.5)
    assert without_time(train(tables, **options).metrics) == without_time(uninterrupted[0].metrics)
