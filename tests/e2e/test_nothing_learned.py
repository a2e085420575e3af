"""Runs that learn nothing end with the reason and what to do."""

from __future__ import annotations

import json
import math

import pytest
from e2e.runs import brorl

TINY = [
    *("rollout.n=8", "rollout.prompts=4", "train.steps=2", "train.checkpoint_every=0", "data.held_out_prompts=8"),
    *("evaluate.every=0", "evaluate.samples=4", "theory.every=0"),
]
RUNS = {  # name of the finding: what makes the run fail, and how its last line begins
    "none right": (["never.jsonl"], "no response of 64 was right: check that the verifier calls a reference answer"),
    "no answer": (
        ["reward.extract=boxed"],
        'no response of 64 had an answer where reward.extract = "boxed" looks for it, inside the only \\boxed{...}: ',
    ),
    "cut off": (["rollout.max_tokens=1"], "every one of 64 responses was cut off at rollout.max_tokens = 1: raise it"),
    "weights unchanged": (["optim.lr=0"], "the trained weights are those of model.path: optim.lr = 0: raise it"),
    "task never right": (["sometimes.jsonl"], "no held-out response to unsolvable was right, before or after: take "),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Rows that the warm model never gets right, and the same with others that it does get right."""
    folder = tmp_path_factory.mktemp("rows")
    pairs = [(a, b) for a in range(1, 10) for b in range(a, 10)]
    solvable, unsolvable = (
        [
            {"prompt": f"{a}, {b}", "answer": str(math.gcd(a, b)) if right else "zqzqzqzq", "id": f"{name} {a} {b}"}
            | {"metadata": {"source_dataset": name}}
            for a, b in pairs
        ]
        for name, right in (("solvable", True), ("unsolvable", False))
    )
    for name, rows in (("never", unsolvable), ("sometimes", solvable + unsolvable)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_learns_nothing_says_why(config, warm, files, tmp_path, name):
    (change,), sentence = RUNS[name]
    own = files / change
    overrides = ["data.tasks=[]", f'data.train=["{own}"]', f'data.held_out=["{own}"]'] if own.exists() else [change]
    done = brorl("train", config, f"model.path={warm}", f"run.dir={tmp_path}", *TINY, *overrides)
    assert done.returncode == 0, done.stderr

    # On the console, where it ends, and in the summary, which is JSON to everyone.
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"warning: {sentence}")
    text = (tmp_path / "summary.json").read_text()
    summary = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    assert summary["findings"] == {name: last.removeprefix("warning: ")}
    assert "nan" not in (done.stdout + done.stderr).lower()
