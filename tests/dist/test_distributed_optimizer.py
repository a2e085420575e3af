"""Checkpoints of the distributed optimizer: bit-exact resume, another data-parallel size, refused layouts."""

from __future__ import annotations

import re

import pytest
import tiny
from dist.test_steps import VARIANTS, assert_bit_exact, assert_same

ZERO = {"parallel": {"distributed_optimizer": True}}
OVERLAP = {"parallel": {"distributed_optimizer": True, "overlap": True}}
BF16 = {"model": {"dtype": "bf16"}}
CASES = [
    pytest.param(2, {}, ZERO | VARIANTS["critic"], id="dp2-critic"),
    pytest.param(2, {}, ZERO | BF16, id="dp2-bf16"),
    pytest.param(2, {}, OVERLAP, id="dp2-overlap"),
    pytest.param(2, {"tensor": 2}, ZERO, id="tp2"),
    pytest.param(4, {"pipeline": 2}, ZERO | VARIANTS["critic"], id="dp2-pp2-critic"),
]


@pytest.mark.parametrize(("size", "parallel", "changes"), CASES)
def test_resume_is_bit_exact(worlds, directory, tmp_path, size, parallel, changes):
    """Adam's step count differs between a run of 3 steps and one that starts again at 2, unless it is restored."""
    whole = worlds(size).run("steps:run_steps", directory, parallel, changes, 3, {})
    cut = worlds(size).run("steps:resumed", directory, parallel, changes, 3, 2, str(tmp_path))
    assert_bit_exact(cut, whole)


@pytest.mark.parametrize(("size", "other"), [(2, 1), (2, 4), (1, 2)])
def test_resume_with_another_number_of_replicas(worlds, directory, tmp_path, size, other):
    changes = ZERO | VARIANTS["critic"]
    whole = worlds(size).run("steps:run_steps", directory, {}, changes, 3, {})
    worlds(size).run("steps:resumed", directory, {}, changes, 2, 2, str(tmp_path))
    got = worlds(other).run("steps:go_on", directory, {}, changes, 1, str(tmp_path))
    assert_same(got, (whole[0][0][2:], whole[0][1], None))


def test_equal_states_are_equal_files(worlds, directory, tmp_path):
    """The memory that Megatron allocates as padding between parameters makes no difference."""
    roots = [str(tmp_path / name) for name in ("clean", "dirty")]
    worlds(2).run("saving_jobs:saves_over_dirty_memory", directory, OVERLAP, roots)
    clean, dirty = ({p.name: p.read_bytes() for p in (tmp_path / n).rglob("*.distcp")} for n in ("clean", "dirty"))
    assert clean
    assert clean == dirty


@pytest.mark.parametrize(
    ("now", "changes", "words"),
    [
        ({"tensor": 2}, ZERO, "parallel.tensor = 1, parallel.pipeline = 1, .* and this run has .*parallel.tensor = 2"),
        ({"pipeline": 2}, ZERO, "parallel.pipeline = 1, .* and this run has .*parallel.pipeline = 2"),
        ({}, {}, "and this run has parallel.distributed_optimizer = false"),
    ],
)
def test_another_layout_is_refused(worlds, directory, tmp_path, now, changes, words):
    worlds(2).run("steps:resumed", directory, {}, ZERO, 1, 1, str(tmp_path))
    for refused in worlds(2).run("saving_jobs:refused", directory, now, changes, str(tmp_path)):
        assert "step_00000001" in refused
        assert re.search(words, refused)


@pytest.mark.parametrize(
    ("size", "parallel", "family"), [(2, {}, "qwen2"), (2, {"expert": 2}, "qwen3_moe"), (4, {"expert": 2}, "qwen3_moe")]
)
def test_masters_are_the_values_of_the_file(worlds, tmp_path, size, parallel, family):
    """Masters are not rounded to bfloat16, also after a checkpoint before the first step."""
    tiny.make_model(tmp_path, family, False)
    names = tiny.weights(tmp_path).keys()
    found = worlds(size).run("saving_jobs:masters", str(tmp_path), parallel, str(tmp_path / "run"))
    for when in zip(*found, strict=True):
        assert [wrong for wrong, _ in when] == [set()] * size
        assert set().union(*(seen for _, seen in when)) == names
