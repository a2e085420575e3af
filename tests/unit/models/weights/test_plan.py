"""The plan of a refit covers every tensor once; cutting and putting together against loops over single heads."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from megatron_brorl.families.shape import parse_shape
from megatron_brorl.models.weights.layouts import Entry, local_shape, to_hf, to_local
from megatron_brorl.models.weights.names import entries, hf_shapes
from megatron_brorl.models.weights.plan import make_plan

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


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("limit", [1, 20_000, 1 << 30])
def test_buckets_cover_everything_once_within_the_limit(tensor, pipeline, limit):
    table = entries(SHAPE, pipeline)
    plan = make_plan(table, SHAPE.kv_heads, tensor, pipeline, 2, limit)
    assert sorted(plan.names) == sorted(hf_shapes(SHAPE))
    assert [e for b in plan.buckets for e in b.entries] == table
    for bucket in plan.buckets:
        assert {e.stage for e in bucket.entries} == {bucket.stage}
        size = sum(2 * math.prod(s) for e in bucket.entries for s in e.hf_shapes)
        assert size <= limit or len(bucket.entries) == 1
        for places, end in (
            ([p for p in bucket.parts if p], bucket.part_size),
            ([p for each in bucket.full for p in each], bucket.full_size),
        ):
            used = [range(p.offset, p.end) for p in places]
            assert all(a.stop <= b.start for a, b in pairwise(used))  # none overlaps the next
            assert not used or used[-1].stop <= end
            assert all(r.start * 2 % 64 == 0 for r in used)
    if limit == 1:
        assert len(plan.buckets) == len(table)
    if limit == 1 << 30:
        assert len(plan.buckets) == pipeline


def part_by_hand(entry: Entry, full: list[torch.Tensor], rank: int, size: int) -> torch.Tensor:
    """Row by row from the description of Megatron's layouts (interleaved query groups, gate above up)."""
    rows = []
    if entry.layout == "replicated":
        return full[0]
    if entry.layout == "columns":
        width = full[0].shape[1] // size
        return full[0][:, rank * width : (rank + 1) * width]
    if entry.layout == "vocab":
        each = -(-len(full[0]) // size)
        for i in range(rank * each, (rank + 1) * each):
            rows.append(full[0][i] if i < len(full[0]) else torch.zeros_like(full[0][0]))
    elif entry.layout == "qkv":
        d, per = SHAPE.head_dim, SHAPE.heads // SHAPE.kv_heads
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
def test_cutting_equals_a_loop_and_is_undone(tensor):
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
    assert seen >= {"replicated", "columns", "vocab", "qkv", "gate_up"}
