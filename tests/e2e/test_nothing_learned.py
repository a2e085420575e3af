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
RUNS = {  # name of the finding: what makes the run fail, and what its last line says
    "none right": (["never.jsonl"], "no response of 64 was right: check that the verifier calls a reference answer"),
    "no answer": (
        ["reward.extract=boxed"],
        'no response of 64 had an answer where reward.extract = "boxed" looks for it, inside the only \\boxed{...}: ',
    ),
    "cut off": (["rollout.max_tokens=1"], " cut off at rollout.max_tokens = 1: raise it"),
    "weights unchanged": (
        ["solvable.jsonl", "optim.lr=0"],
        "the trained weights are those of model.path: optim.lr = 0: raise it",
    ),
    "task never right": (["sometimes.jsonl"], "no held-out response to unsolvable was right, before or after: use "),
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
    for name, rows in (("never", unsolvable), ("solvable", solvable), ("sometimes", solvable + unsolvable)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_learns_nothing_says_why(config, warm, files, tmp_path, name):
    changes, sentence = RUNS[name]
    overrides = []
    for change in changes:
        rows = f'["{files / change}"]'
        is_file = change.endswith(".jsonl")
        overrides += ["data.tasks=[]", f"data.train={rows}", f"data.held_out={rows}"] if is_file else [change]
    done = brorl("train", config, f"model.path={warm}", f"run.dir={tmp_path}", *TINY, *overrides)
    assert done.returncode == 0, done.stderr

    # On the console, where it ends, and in the summary, which is JSON to everyone.
    last = done.stdout.splitlines()[-1]
    assert last.startswith("warning: ")
    assert sentence in last
    text = (tmp_path / "summary.json").read_text()
    summary = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    assert summary["findings"] == {name: last.removeprefix("warning: ")}
    assert "nan" not in (done.stdout + done.stderr).lower()
