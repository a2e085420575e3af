"""Buckets of the weight stream."""

from __future__ import annotations

import math

import pytest

from megatron_brorl.families.shape import parse_shape
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
