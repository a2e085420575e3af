"""Weights of a mixture of experts: from any layout to engines and Hugging Face directories, bit by bit."""

from __future__ import annotations

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

EP2, EP4 = {"expert": 2}, {"expert": 4}
TP = {"tensor": 2, "sequence": True}
LAYOUTS = [
    (1, {}),
    (2, EP2),
    (2, {**TP, **EP2}),
    (2, {"context": 2, **EP2}),
    (4, EP4),
    (4, EP2),
    (4, {"pipeline": 2, **EP2}),
    (4, {**TP, **EP4}),
    (4, {**TP, **EP2, "pipeline": 2}),
]


@pytest.mark.parametrize(
    ("size", "parallel", "family"),
    [*((*case, "qwen3_moe") for case in LAYOUTS), *((*LAYOUTS[i], "qwen2_moe") for i in (0, 2, 6))],
)
def test_weight_syncs_are_bit_exact(worlds, tmp_path, size, parallel, family):
    for seed in range(2):
        tiny.make_model(tmp_path / str(seed), family, True, seed=seed)
    directories = [str(tmp_path / str(seed)) for seed in range(2)]
    world = worlds(size)
    assert world.run("weight_sync_jobs:syncs", directories, parallel) == [[]] * size
    assert max(world.run("jobs:engine_gap", directories[0], parallel)) <= 5e-5


@pytest.mark.parametrize(
    ("size", "parallel", "family"),
    [(1, {}, "qwen3_moe"), (2, EP2, "qwen3_moe"), (4, EP4, "qwen3_moe"), (2, {**TP, **EP2}, "qwen2_moe")],
)
def test_round_trip_is_bit_exact_and_transformers_loads_it(worlds, tmp_path, size, parallel, family):
    model = tiny.make_model(tmp_path / "in", family, False)
    expected = tiny.weights(tmp_path / "in")
    for seen in worlds(size).run("jobs:export", str(tmp_path / "in"), parallel, str(tmp_path / "out")):
        for found in (seen, tiny.weights(tmp_path / "out")):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], x) for name, x in expected.items())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(loaded) is type(model)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
