"""A study from nothing to its page: what is done stays, what was killed comes out the same, the clock leaves out
evaluations."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import forks
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from study import command, results
from study.design import read, sha256
from study.places import place_of

from megatron_brorl.errors import UserError

TOML = """
name = "whole"
question = "does it run?"
mixed_model = false
processes = 1
[[claims]]
claim = "it does"
refuted_by = "an error"
[warm_starts]
tune = [9]
test = [1]
model = { hidden = 32, layers = 1, heads = 2, kv_heads = 1, ffn = 64, context = 48 }
stages = [["sft.steps=30"]]
[prompts]
pool = 30
samples = 8
trained = 4
unseen = 3
bins = [{ name = "any", least = 0, most = 8 }]
[budget]
rollouts = 64
[evaluation]
points = 2
trained = 4
unseen = 2
final_unseen = 4
k = 4
support = 8
[[arms]]
name = "n4"
n = 4
prompts = 4
lr = 1e-3
[[arms]]
name = "n4wide"
n = 4
prompts = 8
rate_of = "n4"
overrides = ["algo.dynamic_sampling=false"]
[tuning]
factors = [1.0]
bins = ["any"]
[[comparisons]]
before = "n4"
after = "n4wide"
end_point = "area"
over = "rollouts"
prompt_set = "trained"
bins = ["any"]
[config.data]
template = "{prompt}="
[[config.data.tasks]]
name = "gcd"
prompt_regex = 'numbers: (.+)\\. Give'
config = { min_numbers = 2, max_numbers = 2, max_value = 20 }
[config.sft]
examples_per_step = 32
lr = 3e-3
[config.rollout]
max_tokens = 4
[config.reward]
workers = 1
extract = "full"
[config.evaluate]
temperature = 1.0
top_p = 1.0
"""
TIMES = {"seconds", "cpu_seconds", "began", "load_average"}


def table(design, directory):
    """The rows by run, point and prompt set, without what a clock says."""
    rows = results.read_all(directory, sha256(design))
    return {(r["run"], r["point"], r["prompt_set"]): {k: v for k, v in r.items() if k not in TIMES} for r in rows}


@pytest.mark.full
@pytest.mark.skipif(forks.CONTEXT.get_start_method() != "forkserver", reason="every process would import everything")
def test_a_study(tmp_path):
    path, directory = tmp_path / "whole.toml", tmp_path / "runs"
    path.write_text(TOML)
    design = read(path)
    command.check_unchanged(design, directory)
    command.run_all(design, directory)
    found = table(design, directory)

    # A tuning run and two test runs; the end with 64 rollouts: 4 steps of 16, 2 of 32.
    runs = {run for run, _, _ in found}
    assert runs == {"tune_w9_any_n4_lr0.001", "test_w1_any_n4", "test_w1_any_n4wide"}
    ends = {run: found[run, 2, "trained"] for run in runs}
    assert {run: (end["steps"], end["rollouts"]) for run, end in ends.items()} == {
        "tune_w9_any_n4_lr0.001": (4, 64),
        "test_w1_any_n4": (4, 64),
        "test_w1_any_n4wide": (2, 64),
    }
    assert {(point, name) for run, point, name in found if run == "test_w1_any_n4"} == {
        *((point, name) for point in (0, 1, 2) for name in ("trained", "unseen")),
        *((point, "support") for point in (0, 2)),
    }

    # All arms begin with the answers that the warm start gave, of its own prompts.
    start = json.loads(place_of(directory, 1).start.read_text())
    for run in ("test_w1_any_n4", "test_w1_any_n4wide"):
        assert found[run, 0, "trained"]["right"] == start["any"]["right"]
        assert found[run, 0, "support"]["right"] == start["any support"]["right"]
        assert found[run, 1, "unseen"]["samples"] == [2] * 3
    trained, unseen = start["any"]["prompts"], start["unseen"]["prompts"]
    assert not set(trained) & set(unseen)

    # Tokens: 64 responses of at most 4, and the prompt of each of 16 groups.
    end = ends["test_w1_any_n4"]
    rows = [json.loads(line) for line in place_of(directory, 1).prompts("any").read_text().splitlines()]
    assert 64 + 16 * min(len(row["prompt"]) for row in rows) / 2 < end["tokens"]
    assert end["tokens"] <= 64 * 4 + 16 * (1 + max(len(row["prompt"]) for row in rows))

    # A run that was killed is repeated from its start, bit for bit; the others are left as they are.
    kept = results.path_of(directory, "test_w1_any_n4wide")
    before = kept.stat().st_mtime_ns
    results.path_of(directory, "test_w1_any_n4").unlink()
    command.run_all(design, directory)
    assert kept.stat().st_mtime_ns == before
    assert table(design, directory) == found

    # The page, and a job that fails in one line.
    command.write_page(design, directory, path)
    assert sha256(design) in (directory / "page.md").read_text()
    results.path_of(directory, "test_w1_any_n4").unlink()
    place_of(directory, 1).prompts("any").write_text("no rows\n")
    with pytest.raises(UserError, match=r"any\.jsonl:1.*test_w1_any_n4\.log.*start the same command again"):
        command.run_all(design, directory)
