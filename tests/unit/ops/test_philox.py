"""Philox against published vectors, and the independence of streams."""

from __future__ import annotations

import numpy as np
import torch

from megatron_brorl.ops.philox import philox, stream_key, uniforms


def test_known_answers():
    """Compare with the known answers of Random123 (kat_vectors) for philox4x32-10."""
    zero = torch.zeros(1, dtype=torch.int64)
    words = [int(x) for x in philox(zero, (zero, zero, zero, zero))]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    key = 0xA4093822 | (0x299F31D0 << 32)
    counter = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    words = [int(x) for x in philox(torch.tensor([key]), tuple(torch.tensor([c]) for c in counter))]
    assert words == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_streams_are_distinct_and_uniform():
    """10,000 streams of 8 positions have no duplicates, no correlation by index, and are uniform in 20 bins."""
    keys = torch.tensor([stream_key(0, 0, f"p{i}") for i in range(20)]).repeat_interleave(500)
    sibling = torch.arange(500).repeat(20)
    draws = torch.stack([uniforms(keys, sibling, torch.full_like(sibling, p)) for p in range(8)], dim=1)
    assert len({tuple(row) for row in draws.tolist()}) == 10_000
    assert len(set(draws.flatten().tolist())) == 80_000
    counts = torch.histc(draws.float(), bins=20, min=0, max=1)
    assert ((counts - 4000).square() / 4000).sum() < 43.8  # 99.9% quantile of chi-square, 19 degrees of freedom
    # Correlations of neighbouring streams, of positions and of prompts are within four to five standard errors of 0.
    assert abs(np.corrcoef(draws[:-1, 0], draws[1:, 0])[0, 1]) < 0.04
    assert abs(np.corrcoef(draws[:, 0], draws[:, 1])[0, 1]) < 0.04
    assert np.abs(np.corrcoef(draws[:, 0].view(20, 500)) - np.eye(20)).max() < 4.5 / 500**0.5


def test_stream_keys_are_distinct():
    keys = [stream_key(1, 23, "a"), stream_key(12, 3, "a"), stream_key(1, "23", "a"), stream_key(1, 23, "b")]
    assert len(set(keys)) == 4
    assert all(0 <= k < 2**63 for k in keys)
