"""Buckets of the weight stream; sharding and merging of parameters against loops over single heads."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_brorl.families.shape import parse_shape
from megatron_brorl.models.weights.layouts import WeightEntry, local_shape, to_hf, to_local
from megatron_brorl.models.weights.names import entries, hf_shapes
from megatron_brorl.models.weights.stream import make_buckets

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "vocab_size": 103,
}
SHAPE = parse_shape(CONFIG, "config.json")


@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("limit", [1, 20_000, 1 << 30])
def test_buckets_hold_every_entry_once_within_the_limit(pipeline, limit):
    table = entries(SHAPE, pipeline)
    buckets = make_buckets(table, 2, limit)
    assert [entry for bucket in buckets for entry in bucket] == table
    assert sorted(name for entry in table for name in entry.hf) == sorted(hf_shapes(SHAPE))
    for bucket in buckets:
        assert len({entry.stage for entry in bucket}) == 1
        size = sum(2 * math.prod(shape) for entry in bucket for shape in entry.hf_shapes)
        assert size <= limit or len(bucket) == 1
    if limit == 1 << 30:
        assert len(buckets) == pipeline


def part_by_hand(entry: WeightEntry, full: list[torch.Tensor], rank: int, size: int) -> torch.Tensor:
    """Return a rank's part, row by row, by Megatron's layouts (interleaved query groups, gate above up)."""
    rows = []
    if entry.layout == "whole":
        return full[0]
    if entry.layout == "columns":
        width = full[0].shape[1] // size
        return full[0][:, rank * width : (rank + 1) * width]
    if entry.layout == "vocab":
        each = -(-len(full[0]) // size)
        for i in range(rank * each, (rank + 1) * each):
            rows.append(full[0][i] if i < len(full[0]) else torch.zeros_like(full[0][0]))
    elif entry.layout == "qkv":
        d = SHAPE.head_dim
        per = SHAPE.heads // SHAPE.kv_heads
        for group in range(rank * SHAPE.kv_heads // size, (rank + 1) * SHAPE.kv_heads // size):
            for head in range(group * per, (group + 1) * per):
                rows += list(full[0][head * d : (head + 1) * d])
            for x in full[1:]:
                rows += list(x[group * d : (group + 1) * d])
    else:
        for x in full:
            each = len(x) // size
            rows += list(x[rank * each : (rank + 1) * each])
    return torch.stack(rows)


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_sharding_equals_a_loop_and_is_invertible(tensor):
    g = torch.Generator().manual_seed(0)
    seen = set()
    for entry in entries(SHAPE, 1):
        seen.add(entry.layout)
        full = [torch.randn(s, generator=g) for s in entry.hf_shapes]
        parts = [to_local(entry, full, SHAPE.kv_heads, rank, tensor) for rank in range(tensor)]
        for rank, part in enumerate(parts):
            assert torch.equal(part, part_by_hand(entry, full, rank, tensor))
            assert tuple(part.shape) == local_shape(entry, tensor)
        back = to_hf(entry, [p.contiguous() for p in parts], SHAPE.kv_heads)
        assert all(torch.equal(a, b) for a, b in zip(back, full, strict=True))
        assert all(x.is_contiguous() for x in back)
    assert seen >= {"whole", "columns", "vocab", "qkv", "gate_up"}
