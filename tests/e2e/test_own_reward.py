"""A reward of one's own trains a model from outside the package, as examples/own_reward has it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import forks
import pytest
from e2e.runs import brorl, rows

ROOT = Path(__file__).parents[2]
SMALL = ["--hidden", "32", "--layers", "2", "--heads", "2", "--kv-heads", "1", "--ffn", "64", "--context", "32"]
STEPS = [
    "rollout.n=16",
    "rollout.prompts=4",
    "train.steps=2",
    "evaluate.samples=2",
    "train.checkpoint_every=1",
    "reward.cut_off_factor=1.0",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A working directory with the example and a model whose tokenizer knows its rows."""
    place = tmp_path_factory.mktemp("own")
    shutil.copytree(ROOT / "examples" / "own_reward", place / "examples" / "own_reward")
    tool = ROOT / "tools" / "make_tiny_model.py"
    done = forks.script(tool, "examples/own_reward/own_reward.toml", "init", *SMALL, cwd=place)
    assert done.returncode == 0, done.stderr
    return place


def train(place: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    options = ["model.path=init", "run.dir=run", *STEPS, *overrides]
    return brorl("train", "examples/own_reward/own_reward.toml", *options, cwd=place)


def test_two_steps_and_the_file_that_they_are_held_to(place):
    # A reward by the length of the response: one that a random model gets some of.
    file = place / "lengths.py"
    file.write_text("def score(response, row):\n    return min(1.0, len(response) / 32)\n")
    done = train(place, "data.verifier=lengths.py:score")
    assert done.returncode == 0, done.stderr
    lines = rows(place / "run")
    assert [line["step"] for line in lines] == [0, 1]
    assert all(0 < line["reward"] < 1 for line in lines)

    # Its checkpoints belong to this very file.
    file.write_text(file.read_text() + "# a comment\n")
    again = train(place, "data.verifier=lengths.py:score", "train.steps=3")
    assert again.returncode == 2
    (line,) = [line for line in again.stderr.splitlines() if "lengths.py" in line]
    assert "was written with another file of verifier lengths.py:score (sha256 " in line


@pytest.mark.parametrize(
    ("verifier", "message"),
    [
        ("wrong.py:score", "verifier wrong.py:score: cannot be imported: SyntaxError: "),
        ("examples/own_reward/sums.py:scored", "has no function 'scored'; define it, or name another"),
        ("exakt", "data.verifier: no verifier is called 'exakt'; did you mean exact?"),
    ],
)
def test_a_mistake_ends_in_one_line_before_training(place, verifier, message):
    (place / "wrong.py").write_text("def score(:\n")
    done = train(place, f"data.verifier={verifier}", "run.dir=none")
    assert done.returncode == 2
    assert message in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not (place / "none" / "metrics.jsonl").exists()


def test_the_example_scores_sums(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "own_reward"))
    import sums

    lines = [json.loads(line) for line in (ROOT / "examples" / "own_reward" / "rows.jsonl").read_text().splitlines()]
    assert len(lines) == 20
    for row in lines:
        total = row["metadata"]["sum"]
        assert str(total) == row["prompt"]
        rewards = [sums.score(text, row)["reward"] for text in (row["answer"], f"0+{total}", f"1+{total}", "x", "1+")]
        assert rewards == [1.0, 1.0, 0.2, 0.0, 0.0]
