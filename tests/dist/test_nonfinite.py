"""All ranks take the same decision if rows, or one rank's weights, are not finite."""

from __future__ import annotations

import pytest
from dist.test_steps import UNEVEN, assert_same

LAYOUTS = [(2, {}), (2, {"tensor": 2}), (2, {"pipeline": 2}), (4, {"pipeline": 2}), (4, {"context": 2})]
ENGINE = [("p/0", 5), ("p/1", 15), ("p/1", 16), ("p/2", 31), ("p/4", 0)]
TOKEN = 40
# Before several updates a forward pass of the actor finds the NaN.
CHANGES = UNEVEN | {"algo": {"mini_batches": 2, "epochs": 2}, "theory": {"every": 0}}


@pytest.mark.slow
def test_all_layouts_leave_out_the_same_rows(worlds, directory):
    expected = worlds(1).run("nonfinite_jobs:steps", directory, {}, CHANGES, TOKEN, ENGINE)[0]
    for metrics in expected[0]:
        assert metrics["nonfinite_rows"] > 4
        assert (metrics["updates_skipped"], metrics["updates"]) == (0, 4)
    for size, parallel in LAYOUTS:
        assert_same(worlds(size).run("nonfinite_jobs:steps", directory, parallel, CHANGES, TOKEN, ENGINE), expected)


@pytest.mark.parametrize(("size", "parallel"), [(2, {"tensor": 2}), (4, {"pipeline": 2})])
def test_nan_weights_on_one_rank_end_the_run_before_a_checkpoint(worlds, directory, tmp_path, size, parallel):
    """The error is one line, the same on every rank, with the layer's number in the whole model."""
    said = set(worlds(size).run("nonfinite_jobs:refused", directory, parallel, str(tmp_path)))
    assert len(said) == 1
    weight = "decoder.layers.3.mlp.linear_fc1.weight"
    assert said.pop().startswith(
        f"the state after 2 steps, actor: weights that are not finite: {weight}; no checkpoint"
    )
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "step_00000001"
    assert [p.name for p in sorted((tmp_path / "checkpoints").glob("*step_*"))] == ["step_00000001"]
