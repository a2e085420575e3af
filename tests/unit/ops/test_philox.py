"""Philox against NumPy's published implementation, and keyed sampling against the softmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_brorl.ops.philox import philox, stream_key, uniforms
from megatron_brorl.ops.reference.sampling import sample


def words(key: int, counter: tuple[int, int, int, int]) -> list[int]:
    """Return four 32-bit words of Philox4x32-10, from the paper, with Python integers."""
    k = [key & 0xFFFFFFFF, key >> 32]
    c = list(counter)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def test_known_answers():
    """Compare with the known answers of Random123 (kat_vectors) for philox4x32-10."""
    zero = torch.zeros(1, dtype=torch.int64)
    got = [int(x) for x in philox(zero, (zero, zero, zero, zero))]
    assert got == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    key = 0xA4093822 | (0x299F31D0 << 32)
    counter = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    got = [int(x) for x in philox(torch.tensor([key]), tuple(torch.tensor([c]) for c in counter))]
    assert got == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_equals_integer_arithmetic():
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 2**63, 200)
    counters = rng.integers(0, 2**32, (4, 200))
    got = torch.stack(philox(torch.tensor(keys), tuple(torch.tensor(c) for c in counters))).T.tolist()
    assert got == [words(int(k), tuple(int(c[i]) for c in counters)) for i, k in enumerate(keys)]


def test_streams_are_distinct_and_uniform():
    """10,000 streams of 8 positions have no duplicates, no correlation by index, and are uniform in 20 bins."""
    keys = torch.tensor([stream_key(0, 0, f"p{i}") for i in range(20)]).repeat_interleave(500)
    sibling = torch.arange(500).repeat(20)
    draws = torch.stack([uniforms(keys, sibling, torch.full_like(sibling, p)) for p in range(8)], dim=1)
    assert len({tuple(row) for row in draws.tolist()}) == 10_000
    assert len(set(draws.flatten().tolist())) == 80_000
    counts = torch.histc(draws.float(), 20, 0, 1)
    assert ((counts - 4000).square() / 4000).sum() < 43.8  # 99.9% quantile of chi-square with 19 degrees
    neighbours = np.corrcoef(draws[:-1, 0], draws[1:, 0])[0, 1]
    positions = np.corrcoef(draws[:, 0], draws[:, 1])[0, 1]
    assert abs(neighbours) < 0.04  # four standard errors
    assert abs(positions) < 0.04
    by_prompt = draws[:, 0].view(20, 500)
    for lag in (1, 2, 7, 64, 499):  # between rollouts of a prompt, and between two prompts
        pairs = by_prompt[:, :-lag].flatten(), by_prompt[:, lag:].flatten()
        limit = 4 / len(pairs[0]) ** 0.5
        assert abs(np.corrcoef(*pairs)[0, 1]) < limit
    assert np.abs(np.corrcoef(by_prompt) - np.eye(20)).max() < 4.5 / 500**0.5  # 190 pairs
    index = np.arange(500)
    assert max(abs(np.corrcoef(row, index)[0, 1]) for row in by_prompt) < 4 / 500**0.5


def test_stream_keys_are_distinct():
    keys = [stream_key(1, 23, "a"), stream_key(12, 3, "a"), stream_key(1, "23", "a"), stream_key(1, 23, "b")]
    assert len(set(keys)) == 4
    assert all(0 <= k < 2**63 for k in keys)


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.6, 1.0, 0), (1.0, 0.8, 0), (1.3, 0.9, 5)]
)
def test_sampling_frequencies_and_log_probs(temperature, top_p, top_k):
    logits = 1.5 * torch.randn(12, generator=torch.Generator().manual_seed(4))
    expected = distribution_by_hand(logits.double().numpy(), temperature, top_p, top_k)
    n = 200_000
    index = torch.arange(n)
    u = uniforms(torch.full_like(index, stream_key("sampling")), index, torch.zeros_like(index))
    ids, log_probs = sample(logits.expand(n, -1), u, temperature, top_p, top_k)
    counts = np.bincount(ids.numpy(), minlength=12)
    live = expected > 0
    assert counts[~live].sum() == 0
    chi_square = ((counts[live] - n * expected[live]) ** 2 / (n * expected[live])).sum()
    assert chi_square < 31.3  # 99.9% quantile with 11 degrees, an upper bound for fewer
    np.testing.assert_allclose(log_probs.numpy(), np.log(expected[ids.numpy()]), atol=1e-5)


def distribution_by_hand(logits: np.ndarray, temperature: float, top_p: float, top_k: int) -> np.ndarray:
    p = np.exp(logits / temperature)
    order = np.argsort(-p)
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    kept = []
    mass = 0.0
    for i in order:
        if mass >= top_p:
            break
        kept.append(i)
        mass += p[i]
    cut = np.zeros_like(p)
    cut[kept] = p[kept]
    return cut / cut.sum()


def test_extreme_uniforms_and_logits():
    logits = torch.tensor([[-1e4, 1e4, 0.0], [0.0, 0.0, float("-inf")]])
    for u in (1e-300, 1 - 2**-53):
        ids, log_probs = sample(logits, torch.full((2,), u, dtype=torch.float64), 1.0)
        assert ids[0] == 1
        assert ids[1] != 2
        assert torch.isfinite(log_probs).all()


def test_greedy_is_argmax():
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(5))
    ids, log_probs = sample(logits, torch.full((5,), 0.5), 0.0)
    assert torch.equal(ids, logits.argmax(-1))
    assert torch.equal(log_probs, torch.zeros(5))
