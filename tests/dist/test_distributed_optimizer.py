"""Checkpoints of the distributed optimizer: bit-exact resume, another data-parallel size, refused layouts."""

from __future__ import annotations

import re

import pytest
import torch
from dist.test_steps import VARIANTS, assert_bit_exact, assert_same
from safetensors.torch import load_file

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
    """Adam's step count differs between a run of 4 steps and one that starts again at 2, unless it is restored."""
    whole = worlds(size).run("steps:run_steps", directory, parallel, changes, 4, {})
    cut = worlds(size).run("steps:resumed", directory, parallel, changes, 4, 2, str(tmp_path))
    assert_bit_exact(cut, whole)


@pytest.mark.parametrize(("size", "other"), [(2, 1), (2, 4), (1, 2)])
def test_resume_with_another_number_of_replicas(worlds, directory, tmp_path, size, other):
    changes = ZERO | VARIANTS["critic"]
    whole = worlds(size).run("steps:run_steps", directory, {}, changes, 4, {})
    worlds(size).run("steps:resumed", directory, {}, changes, 2, 2, str(tmp_path))
    got = worlds(other).run("steps:go_on", directory, {}, changes, 2, str(tmp_path))
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


def test_masters_are_the_values_of_the_file(worlds, directory, tmp_path):
    """The weights are rounded to bfloat16 and the masters are not, also after a checkpoint before the first step."""
    names = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.layers.1.mlp.linear_fc2.weight": "model.layers.1.mlp.down_proj.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
    }
    stored = load_file(f"{directory}/model.safetensors")
    found = worlds(2).run("saving_jobs:masters", directory, str(tmp_path))
    for when in (0, 1):
        for megatron, hf in names.items():
            flat = torch.full_like(stored[hf].flatten(), float("nan"))
            for start, values in (rank[when][megatron] for rank in found if megatron in rank[when]):
                flat[start : start + len(values)] = values
            assert torch.equal(flat, stored[hf].flatten())
            assert hf == "model.norm.weight" or not torch.equal(flat, flat.bfloat16().float())
