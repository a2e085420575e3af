"""Buckets of the weight stream."""

from __future__ import annotations

import math

import pytest
from random_model import qwen2_config

from megatron_brorl.families.shape import parse_shape
from megatron_brorl.models.weights.names import entries, hf_shapes
from megatron_brorl.models.weights.stream import make_buckets

SIZES = {"hidden": 48, "layers": 4, "heads": 8, "kv_heads": 4, "ffn": 88, "vocab": 103, "context": 64}
SHAPE = parse_shape(qwen2_config(**SIZES) | {"tie_word_embeddings": False}, "config.json")


@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("limit", [1, 20_000, 1 << 30])
def test_buckets_hold_every_entry_once_within_the_limit(pipeline, limit):
    table = entries(SHAPE, pipeline)
    buckets = make_buckets(table, item_bytes=2, limit=limit)
    assert [entry for bucket in buckets for entry in bucket] == table
    assert sorted(name for entry in table for name in entry.hf) == sorted(hf_shapes(SHAPE))
    for bucket in buckets:
        assert len({entry.stage for entry in bucket}) == 1
        size = sum(2 * math.prod(shape) for entry in bucket for shape in entry.hf_shapes)
        assert size <= limit or len(bucket) == 1
    if limit == 1 << 30:
        assert len(buckets) == pipeline
