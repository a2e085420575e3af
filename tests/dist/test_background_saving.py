"""Checkpoints that are written in the background have the same bytes as others, in any layout."""

from __future__ import annotations

import pytest
from dist.test_steps import VARIANTS

pytestmark = pytest.mark.slow
# A critic and its optimizer, carried rollouts, a reference policy.
CASES = [
    (1, {}, "critic"),
    (2, {}, "partial"),
    (2, {"tensor": 2}, "reward_kl"),
    (4, {"pipeline": 2}, "critic"),
]


@pytest.mark.parametrize(("size", "parallel", "variant"), CASES)
def test_background_checkpoints_have_the_state_at_their_start(worlds, directory, tmp_path, size, parallel, variant):
    """The bytes are equal, although all weights and moments change before the first file is written.

    Neither way changes a metric of the run."""
    changes = VARIANTS[variant]
    found = worlds(size).run("saving_jobs:both_ways", directory, parallel, changes, str(tmp_path))
    whole = worlds(size).run("steps:run_steps", directory, parallel, changes, 4, {})
    for (metrics, there, busy), (expected, _, _) in zip(found, whole, strict=True):
        assert [repr(f) for f in metrics] == [repr(f) for f in expected]
        assert there == [".step_00000002.writing"]
        assert busy

    at_once, meanwhile = (files(tmp_path / name / "checkpoints") for name in ("at_once", "meanwhile"))
    assert list(at_once) == list(meanwhile)
    assert [name for name in at_once if at_once[name] != meanwhile[name]] == []
    metadata = next(data for name, data in at_once.items() if name.endswith(".metadata"))
    assert (b"exp_avg_sq" in metadata) == (variant != "partial")  # two steps without a closed group
    assert any("carried_" in name for name in at_once) == (variant == "partial")


def files(root):
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
