"""Two bf16 steps on Transformer Engine's layers over GPUs, against the same two steps on one."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import tiny
import torch
from dist.world import World

from megatron_brorl.parallel import cpu_bridge

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cpu_bridge.on_gpu(), reason="no CUDA device"),
    pytest.mark.skipif(not cpu_bridge.has_transformer_engine(), reason="no Transformer Engine"),
]
ZERO = {"distributed_optimizer": True}
OVERLAP = {**ZERO, "overlap": True}
SELECTIVE = {"fields": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {  # ranks, layout, options
    "recompute": (1, {}, {"recompute": True}),
    "recompute attention": (1, {}, SELECTIVE),
    "offload": (1, {}, {"offload": True, **ZERO}),
    "distributed optimizer": (2, {}, ZERO),
    "overlap": (2, {}, {**OVERLAP, "tokens": 60}),
    "tensor": (2, {"tensor": 2}, {}),
    "sequence": (2, {"tensor": 2, "sequence": True}, {}),
    "pipeline": (2, {"pipeline": 2}, {"tokens": 60}),
    "context": (2, {"context": 2}, {}),
    "context of four": (4, {"context": 4}, {}),
    "experts": (2, {"expert": 2}, {}),
    "all axes": (8, {"tensor": 2, "pipeline": 2, "context": 2, "sequence": True}, {**ZERO, "recompute": True}),
}
OPTIONS = {"dtype": torch.bfloat16, "share_prompt": False}


@pytest.fixture(scope="module")
def directories(tmp_path_factory) -> dict[str, str]:
    models = {}
    for family in ("qwen2", "qwen3_moe"):
        path = tmp_path_factory.mktemp("model")
        models[family] = str(path)
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 512}
        tiny.make_model(path, family, tied=True, std=0.05, **sizes)  # A larger std lets bf16 errors grow with depth.
    return models


def steps(size: int, directory: str, parallel: dict[str, Any], options: dict[str, Any]) -> Any:
    world = World(size)
    try:
        return world.run("jobs:train_steps", directory, parallel, {**OPTIONS, **options})
    finally:
        world.close()


@pytest.fixture(scope="module")
def single(directories) -> Any:
    return functools.cache(lambda family: steps(1, directories[family], {}, {"tokens": 100_000})[0])  # one micro-batch


@pytest.mark.parametrize("case", CASES)
def test_steps_agree_with_those_on_one_gpu(case, directories, single):
    """Metrics agree within 3%, and weights differ by less than a quarter of their change in the steps."""
    size, parallel, options = CASES[case]
    if size > GPUS:
        pytest.skip(f"needs {size} GPUs")
    family = "qwen3_moe" if case == "experts" else "qwen2"
    before = tiny.weights(directories[family])
    expected, expected_weights = single(family)
    for metrics, weights in steps(size, directories[family], parallel, options):
        for row, expected_row in zip(metrics, expected, strict=True):
            assert row["trained_tokens"] == expected_row["trained_tokens"]
            for key in ("loss", "grad_norm", "entropy"):
                assert row[key] == pytest.approx(expected_row[key], rel=0.03, abs=0.003)
        moved = sum(float((w.float() - before[n]).square().sum()) for n, w in expected_weights.items()) ** 0.5
        error = sum(float((w.float() - expected_weights[n].float()).square().sum()) for n, w in weights.items()) ** 0.5
        assert moved > 0
        assert error < moved / 4


def test_context_parallel_streams_are_cut_as_transformer_engine_cuts_them():
    pytest.importorskip("transformer_engine.pytorch")  # loads the libraries of transformer_engine_torch
    tex = pytest.importorskip("transformer_engine_torch")
    from megatron_brorl.parallel.packing import PackedGroup, own_tokens, segment_lengths

    groups = (PackedGroup(0, ((3, 8), (2, 24))), PackedGroup(0, ((1, 16),)))
    ends = torch.tensor([0, *segment_lengths(groups)]).cumsum(0).int().cuda()
    for rank in range(4):
        expected = tex.thd_get_partitioned_indices(ends, int(ends[-1]), 4, rank)
        assert own_tokens(groups, rank, 4).tolist() == expected.tolist()
