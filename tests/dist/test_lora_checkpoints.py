"""Checkpoints of adapters under every layout."""

from __future__ import annotations

import pytest
from dist.test_steps import assert_bit_exact, assert_same

# Checkpoints also hold the adapters of a reference policy.
LORA = {"lora": {"rank": 3, "alpha": 12.0}, "algo": {"kl_coef": 0.05}, "reference": {"reset_every": 1}}
ZERO = LORA | {"parallel": {"distributed_optimizer": True}, "algo": {"kl_coef": 0.05, "advantage": "gae"}}
BF16 = ZERO | {"model": {"dtype": "bf16"}}
ONE = [(1, {})]
LAYOUTS = [(2, {}), (2, {"tensor": 2}), (2, {"tensor": 2, "sequence": True}), (2, {"pipeline": 2})]


@pytest.mark.parametrize(
    ("size", "parallel", "changes", "others"),
    [(1, {}, LORA, LAYOUTS), *((*layout, LORA, ONE) for layout in LAYOUTS), (2, {}, ZERO, ONE), (2, {}, BF16, [])],
)
def test_resume_is_bit_exact_and_other_layouts_continue(worlds, directory, tmp_path, size, parallel, changes, others):
    whole = worlds(size).run("steps:run_steps", directory, parallel, changes, 3, {})
    cut = worlds(size).run("steps:resumed", directory, parallel, changes, 3, 2, str(tmp_path))
    assert_bit_exact(cut, whole)
    metrics, weights, _ = whole[0]
    for ranks, other in others:
        got = worlds(ranks).run("steps:go_on", directory, other, changes, 1, str(tmp_path))
        assert_same(got, (metrics[2:], weights, None))
