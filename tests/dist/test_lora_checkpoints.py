"""Checkpoints of adapters under every layout."""

from __future__ import annotations

import pytest
from dist.test_steps import assert_bit_exact, assert_same

# Checkpoints also hold the adapters of a reference policy.
LORA = {
    "lora": {"rank": 3, "alpha": 12.0},
    "algo": {"kl_coef": 0.05},
    "reference": {"reset_every": 1},
}
ZERO = LORA | {"parallel": {"distributed_optimizer": True}, "algo": {"kl_coef": 0.05, "advantage": "gae"}}
BF16 = ZERO | {"model": {"dtype": "bf16"}}
LAYOUTS = {1: [{}], 2: [{}, {"tensor": 2}, {"tensor": 2, "sequence": True}, {"pipeline": 2}]}


@pytest.mark.parametrize(
    ("size", "parallel", "changes"),
    [(2, {}, ZERO), (2, {"tensor": 2}, LORA), (2, {"pipeline": 2}, LORA), (2, {}, BF16)],
)
def test_resume_is_bit_exact(worlds, directory, tmp_path, size, parallel, changes):
    whole = worlds(size).run("steps:run_steps", directory, parallel, changes, 3, {})
    cut = worlds(size).run("steps:resumed", directory, parallel, changes, 3, 2, str(tmp_path))
    assert_bit_exact(cut, whole)


@pytest.mark.parametrize(
    ("size", "parallel"), [(size, parallel) for size, all_ in LAYOUTS.items() for parallel in all_]
)
def test_a_checkpoint_loads_under_another_layout(worlds, directory, tmp_path, size, parallel):
    """A checkpoint of one process continues under this layout, and one of this layout on one process."""
    ((metrics, weights, _),) = worlds(1).run("steps:run_steps", directory, {}, LORA, 3, {})
    for before, after, name in [((1, {}), (size, parallel), "to"), ((size, parallel), (1, {}), "from")]:
        root = str(tmp_path / name)
        worlds(before[0]).run("steps:resumed", directory, before[1], LORA, 2, 2, root)
        got = worlds(after[0]).run("steps:go_on", directory, after[1], LORA, 1, root)
        assert_same(got, (metrics[2:], weights, None))
