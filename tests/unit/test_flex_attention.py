"""FlexAttention over shared prompts, as GPUs will run it, against the CPU's attention."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from megatron_brorl.models.layers.attention import PackedAttention, Segments
from megatron_brorl.parallel.batch import Group

GROUPS = [
    (Group(7, ((2, 3), (1, 5))),),
    (Group(4, ((3, 1),)), Group(0, ((1, 6), (2, 4))), Group(130, ((1, 140),)), Group(3, ())),
]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("groups", GROUPS)
def test_forward_agrees_with_the_attention_of_the_cpu(groups):
    total = sum(g.prefix + sum(count * n for count, n in g.segments) for g in groups)
    g = torch.Generator().manual_seed(total)
    q, k, v = (torch.randn(total, 1, heads, 16, generator=g) for heads in (6, 2, 2))
    config = TransformerConfig(num_layers=1, hidden_size=96, num_attention_heads=6, num_query_groups=2)
    packing = Segments(groups=groups, cos=torch.ones(total, 8), sin=torch.zeros(total, 8))
    expected = PackedAttention(config)(q, k, v, None, packed_seq_params=packing)
    q, k, v = (x.squeeze(1) for x in (q, k, v))
    got = packing.attend_on_gpu(q, k, v, None)
    assert got.shape == expected.shape
    assert (got - expected).norm() <= 1e-5 * expected.norm()
    # A token changes nothing but what attends to it: its own segment from there on, or from a prompt its whole group.
    first = groups[0]
    changed = v.clone()
    changed[first.prefix] += 1.0
    moved = (packing.attend_on_gpu(q, k, changed, None) != got).flatten(1).any(1).nonzero().flatten().tolist()
    assert moved == list(range(first.prefix, first.prefix + first.segments[0][1]))
