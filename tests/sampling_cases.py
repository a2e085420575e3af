"""Cases for samplers on any device, checked against the distribution by brute force in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_brorl.ops import philox

ROUNDING = 5e-6  # error of a cumulative probability, relative to the total, from exponentials in float32
INF = float("inf")


@dataclass(frozen=True)
class Case:
    """Logits [B, V] and sampler settings of one call."""

    logits: Tensor
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @property
    def stream(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys, index and position [B], different in every row."""
        row = torch.arange(len(self.logits))
        return 1_000_003 * row + 2**61, row * row, 7 * row


def normal(rows: int, vocab: int, scale: float = 2.0, seed: int = 0) -> Tensor:
    return scale * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed + rows + vocab))


def masked(rows: int, vocab: int) -> Tensor:
    """Return logits whose row i keeps the multiples of i + 2; one row keeps only token 0."""
    token = torch.arange(vocab)
    return torch.stack([normal(1, vocab, seed=i)[0].masked_fill(token % (i + 2) != 0, -INF) for i in range(rows)])


def one_left(rows: int, vocab: int) -> Tensor:
    logits = torch.full((rows, vocab), -INF)
    logits[torch.arange(rows), torch.arange(rows) * 37 % vocab] = -3.0
    return logits


def rising(rows: int, vocab: int) -> Tensor:
    """Return logits in which every block of tokens has almost no mass compared with the next."""
    return torch.linspace(-200, 200, vocab).repeat(rows, 1)


CASES = {
    **{f"plain-{v}": Case(normal(40, v)) for v in (1, 2, 3, 17, 103, 511, 512, 513, 1031, 4096)},
    "plain-32000": Case(normal(12, 32000)),
    "plain-151936": Case(normal(4, 151936)),
    "cold": Case(normal(60, 1031), temperature=0.3),
    "hot": Case(normal(60, 1031), temperature=7.0),
    "freezing": Case(normal(20, 1031).round(), temperature=1e-42),
    "top-p": Case(normal(120, 1031), top_p=0.9),
    "top-p-cold": Case(normal(120, 5000), temperature=0.6, top_p=0.95),
    "top-p-wide": Case(normal(40, 5000), top_p=1 - 1e-7),
    "top-p-tiny": Case(normal(40, 1031), top_p=1e-12),
    "top-p-32000": Case(normal(12, 32000), top_p=0.95),
    "top-p-151936": Case(normal(4, 151936), top_p=0.8),
    "top-p-peaked-32000": Case(normal(12, 32000, scale=6.0), top_p=0.9),
    "top-k": Case(normal(120, 1031), top_k=7),
    "top-k-1": Case(normal(40, 1031), top_k=1),
    "top-k-most": Case(normal(40, 1031), top_k=1000),
    "top-k-vocab": Case(normal(40, 103), top_k=103),
    "top-k-beyond": Case(normal(40, 103), top_k=5000),
    "top-k-32000": Case(normal(12, 32000), top_k=50),
    "top-k-few-blocks": Case(normal(40, 5000), top_k=100),
    "both": Case(normal(120, 1031), temperature=1.3, top_p=0.8, top_k=50),
    "both-32000": Case(normal(12, 32000), top_p=0.9, top_k=300),
    "ties": Case(normal(80, 1031).round(), top_k=7),
    "ties-top-p": Case(normal(80, 1031).round(), top_p=0.77),
    "ties-both": Case(normal(80, 1031).round(), top_p=0.77, top_k=40),
    "equal": Case(torch.full((80, 1000), -4.5), top_p=0.25),
    "equal-6000": Case(torch.full((12, 6000), 1.5), top_p=0.25, top_k=9),
    "zeros-of-both-signs": Case(torch.tensor([0.0, -0.0]).repeat(80, 300), top_p=0.25),
    "masked": Case(masked(20, 1031)),
    "masked-top-p": Case(masked(20, 1031), top_p=0.9),
    "masked-top-k": Case(masked(20, 1031), top_k=600),
    "masked-32000-top-k": Case(masked(12, 32000), top_k=50),
    "one-left": Case(one_left(40, 1031)),
    "one-left-top-p": Case(one_left(40, 1031), top_p=0.5, top_k=3),
    "rising": Case(rising(20, 4000)),
    "rising-top-p": Case(rising(20, 4000), top_p=0.99999),
    "huge": Case(normal(40, 1031, scale=1e4)),
    "huge-top-p": Case(normal(40, 1031, scale=1e4), top_p=0.9, temperature=3e3),
    "largest-floats": Case(torch.tensor([3.3e38, -3.3e38, 3.3e38]).repeat(40, 100)),
    "greedy": Case(normal(40, 1031), temperature=0.0),
    "greedy-ties": Case(normal(40, 1031).round(), temperature=0.0, top_p=0.5, top_k=3),
    "greedy-one-left": Case(one_left(40, 1031), temperature=0.0),
}


def weights(logits: np.ndarray, case: Case, top_p: float) -> np.ndarray:
    """Return the unnormalised probabilities [V] of a row, 0 for tokens never drawn. top_p: replaces case.top_p."""
    order = np.argsort(-logits, kind="stable")
    if case.top_k:
        kth_largest = logits[order[min(case.top_k, len(order)) - 1]]
        order = order[: np.count_nonzero(logits >= kth_largest)]  # keeps its ties
    mass = np.exp((logits - logits.max()) / case.temperature)
    if top_p < 1:
        mass_before = np.concatenate(([0.0], np.cumsum(mass[order])[:-1]))
        order = order[mass_before < top_p * mass[order].sum()]
    kept = np.zeros_like(mass)
    kept[order] = mass[order]
    return kept


def check(draw: Callable[..., tuple[Tensor, Tensor]], case: Case, device: str, dtype: torch.dtype) -> None:
    """Draw on `device` and compare every row with its float64 distribution."""
    logits = case.logits.to(dtype)
    settings = (case.temperature, case.top_p, case.top_k)
    ids, log_probs = draw(logits.to(device), *(x.to(device) for x in case.stream), *settings)
    assert (ids.dtype, log_probs.dtype) == (torch.int64, torch.float32)
    assert ids.device.type == log_probs.device.type == device
    uniforms = philox.uniforms(*case.stream).tolist()
    rows = zip(logits.double().numpy(), ids.tolist(), log_probs.tolist(), uniforms, strict=True)
    for row, token, log_prob, uniform in rows:
        if case.temperature == 0:
            assert (token, log_prob) == (row.argmax(), 0)
            continue
        # If the mass before a token equals top_p within rounding, the token may be kept or not.
        bounds = {case.top_p, case.top_p * (1 - ROUNDING), min(1.0, case.top_p * (1 + ROUNDING))}
        assert any(agrees(weights(row, case, p), token, log_prob, uniform) for p in bounds), (token, log_prob)


def agrees(mass: np.ndarray, token: int, log_prob: float, uniform: float) -> bool:
    p = mass / mass.sum()
    cdf = np.concatenate(([0.0], np.cumsum(p)))
    is_drawn = p[token] > 0 and cdf[token] - ROUNDING <= uniform <= cdf[token + 1] + ROUNDING
    return bool(is_drawn and abs(log_prob - np.log(p[token])) <= ROUNDING + 1e-6 * abs(log_prob))
