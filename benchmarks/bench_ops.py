#!/usr/bin/env python3
"""Time and extra peak memory of the fused linear PPO loss, forward and backward, against other implementations.

    python benchmarks/bench_ops.py [--quick] [--json FILE] [--shapes 0 2] [--impl fused eager] [--dtypes fp32 bf16]
                              [--clipped SHARE] [--device cuda] [--threads N] [--repeat N]

Every row is measured in a separate process, after one call that compiles and warms up: the median of the seconds and
the growth of the memory at its peak, that of torch's tensors on a GPU and the resident set on a CPU. "products" is the
three matrix products alone, and "own" the fused op with the loss as a user's function (algo.policy_loss).
fma_peak_share counts three products, 6 T H V operations, against the machine's peak in the same dtype
(bench_common.peak_flops). Only "fused" and "own" return the entropy as well, and leave tokens without a gradient
(clipped ones) out of two of the products. "clipped" is the share of such tokens, by default that of the random old
log-probabilities. Linux only.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from bench_common import DTYPES, add_device, alone, options, peak_flops, write_rows
from measure import timed
from torch import Tensor

from megatron_brorl.algo.policy_loss import PolicyLossSettings, PolicyTokens
from megatron_brorl.ops.fused.linear import CHUNK_ROWS, chunk_rows, linear_log_probs, linear_ppo_loss

# (T, H, V), with the head of SmolLM2-135M as the fifth. The last two are for GPUs.
SHAPES = [(4096, 256, 32000), (4096, 256, 151936), (4096, 896, 151936), (4096, 1536, 151936), (4096, 576, 49152)]
SHAPES += [(16384, 1536, 151936), (16384, 576, 49152)]
LIMITS = (0.2, 0.28, 2.0)  # eps_low, eps_high, is_cap
SEQUENCE = CHUNK_ROWS["cpu"]  # tokens of a sequence
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]  # hidden, weight, ids, old, rollout, advantages


def full_loss(h: Tensor, w: Tensor, ids: Tensor, old: Tensor, rollout: Tensor, advantages: Tensor) -> Tensor:
    """Return the loss from full logits [T, V] in float32, summed over tokens."""
    eps_low, eps_high, is_cap = LIMITS
    log_probs = (h @ w.t()).float().log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    ratio = (log_probs - old).clamp(-20, 20).exp()
    importance = (old - rollout).clamp(-20, 20).exp().clamp(max=is_cap)
    clipped = ratio.clamp(1 - eps_low, 1 + eps_high)
    return -(importance * torch.minimum(ratio * advantages, clipped * advantages)).sum()


def backward(loss: Callable[..., Tensor]) -> Callable[..., float]:
    def run(h: Tensor, w: Tensor, *rest: Tensor) -> float:
        value = loss(h, w, *rest) / len(h)
        value.backward()
        return value.item()

    return run


def clip(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, **_: Tensor) -> Tensor:
    """Return the clipped loss of each token, as a function of a user for algo.policy_loss."""
    ratio = (log_probs - old_log_probs).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - LIMITS[0], 1 + LIMITS[1]) * advantages)


def fused(
    h: Tensor,
    w: Tensor,
    ids: Tensor,
    old: Tensor,
    rollout: Tensor,
    advantages: Tensor,
    *,
    policy_loss: str = "clip",
) -> float:
    eps_low, eps_high, is_cap = LIMITS
    weights = torch.full((len(h),), 1 / len(h), device=h.device)
    sequences = torch.arange(len(h), device=h.device) // SEQUENCE
    tokens = PolicyTokens(rollout, advantages, weights, old, sequences=sequences)
    settings = PolicyLossSettings(eps_low, eps_high, is_cap=is_cap, policy_loss=policy_loss)
    loss = linear_ppo_loss(h, w, ids, tokens, settings, temperature=1.0).loss
    loss.backward()
    return loss.item()


def liger_like(h: Tensor, w: Tensor, *rest: Tensor) -> float:
    """Compute gradients by chunk in the forward pass, with a float32 sum for the weight (Liger-Kernel's scheme)."""
    gradient = torch.func.grad_and_value(full_loss, argnums=(0, 1))
    grad_hidden = torch.empty_like(h)
    grad_weight = torch.zeros_like(w, dtype=torch.float32)
    rows = chunk_rows(h, w)

    def accumulate(part: slice) -> float:  # a function, so that the gradients of a chunk are freed before the next one
        (gh, gw), value = gradient(h.detach()[part], w.detach(), *(x[part] for x in rest))
        grad_hidden[part] = gh
        grad_weight.add_(gw)
        return value.item()

    total = sum(accumulate(slice(i, i + rows)) for i in range(0, len(h), rows))
    h.grad = grad_hidden.detach().div_(len(h))
    w.grad = grad_weight.div_(len(h)).to(w.dtype)
    return total / len(h)


def chunked(loss: Callable[..., Tensor]) -> Callable[..., float]:
    """Run forward and backward passes by chunk, with the chunk size of the fused op; autograd sums the gradients."""

    def run(h: Tensor, w: Tensor, *rest: Tensor) -> float:
        total = 0.0
        rows = chunk_rows(h, w)
        for i in range(0, len(h), rows):
            part = slice(i, i + rows)
            value = loss(h[part], w, *(x[part] for x in rest)) / len(h)
            value.backward()
            total += value.item()
        return total

    return run


def trl_like(h: Tensor, w: Tensor, ids: Tensor, old: Tensor, rollout: Tensor, advantages: Tensor) -> Tensor:
    """Compute log-probabilities as logit - logsumexp, sequence by sequence (TRL's selective_log_softmax)."""
    eps_low, eps_high, is_cap = LIMITS
    logits = (h @ w.t()).view(-1, SEQUENCE, len(w)).float()
    picked = logits.gather(-1, ids.view(-1, SEQUENCE, 1)).squeeze(-1)
    log_probs = (picked - torch.stack([x.logsumexp(-1) for x in logits])).flatten()
    ratio = (log_probs - old).clamp(-20, 20).exp()
    importance = (old - rollout).clamp(-20, 20).exp().clamp(max=is_cap)
    clipped = ratio.clamp(1 - eps_low, 1 + eps_high)
    return -(importance * torch.minimum(ratio * advantages, clipped * advantages)).sum()


def products(h: Tensor, w: Tensor, *_: Tensor) -> float:
    """Compute the logits, and the products of the two gradients from them."""
    with torch.no_grad():
        logits = h @ w.t()
        h.grad = logits @ w
        w.grad = logits.t() @ h
    return math.nan


IMPLEMENTATIONS: dict[str, Callable[[], Callable[..., float]]] = {
    "products": lambda: products,
    "fused": lambda: fused,
    "own": lambda: partial(fused, policy_loss=f"{__file__}:clip"),
    "eager": lambda: backward(full_loss),
    "compile": lambda: backward(torch.compile(full_loss, dynamic=False)),
    "compile_chunked": lambda: chunked(torch.compile(full_loss, dynamic=False)),
    "liger_like": lambda: liger_like,
    "trl_like": lambda: backward(trl_like),
}


def is_clipped(log_probs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """Return the mask [T] of tokens without a gradient."""
    ratio = (log_probs - old).exp()
    return torch.where(advantages > 0, ratio > 1 + LIMITS[1], ratio < 1 - LIMITS[0])


def make_inputs(
    dtype: str, shape: tuple[int, int, int], clipped: float | None, device: str = "cpu"
) -> tuple[Inputs, float]:
    """Return hidden [T, H], weight [V, H], ids, old and rollout log-probs, advantages [T], and the clipped share.

    clipped: the share of tokens outside the clip range; None: as many as the noise of the old log-probabilities makes.
    """
    t, h, v = shape
    g = torch.Generator(device).manual_seed(0)
    normal = partial(torch.randn, generator=g, device=device)
    hidden = normal(t, h).to(DTYPES[dtype]).requires_grad_()
    weight = (normal(v, h) / h**0.5).to(DTYPES[dtype]).requires_grad_()
    ids = torch.randint(0, v, (t,), generator=g, device=device)
    old = -math.log(v) + 0.1 * normal(t)
    rollout_gap = 0.1 * normal(t)
    advantages = normal(t)

    with torch.no_grad():
        log_probs, _ = linear_log_probs(hidden, weight, ids, temperature=1.0)
    if clipped is not None:
        # A log-ratio of 0.5 with the advantage's sign is outside the clip range. The other tokens have a ratio of 1.
        outside = torch.arange(t, device=device) < round(clipped * t)
        outside = outside[torch.randperm(t, generator=g, device=device)]
        old = log_probs - torch.where(outside, 0.5 * advantages.sign(), 0.0)
    share = float(is_clipped(log_probs, old, advantages).float().mean())
    return (hidden, weight, ids, old, old + rollout_gap, advantages), share


def measure(args: tuple[str, str, tuple[int, int, int], float | None, str, int, int]) -> dict[str, Any]:
    """Return one row; to be called in a fresh process."""
    name, dtype, shape, clipped, device, threads, repeat = args
    torch.set_num_threads(threads)
    inputs, share = make_inputs(dtype, shape, clipped, device)
    t, h, v = shape
    hidden, weight = inputs[:2]

    # The first call warms up.
    call = IMPLEMENTATIONS[name]()
    seconds = []
    extra = 0.0
    loss = 0.0
    for i in range(1 + repeat):
        hidden.grad = weight.grad = None
        elapsed, grown, loss = timed(partial(call, *inputs), device)
        if i:
            seconds.append(elapsed)
            extra = max(extra, grown)
    return {
        "op": "linear_ppo_loss",
        "impl": name,
        "dtype": dtype,
        "T": t,
        "H": h,
        "V": v,
        "threads": threads,
        "seconds": statistics.median(seconds),
        "extra_mib": extra,
        "loss": loss,
        "clipped": share,
    }


def rows(
    shapes: Iterable[tuple[int, int, int]],
    names: list[str],
    dtypes: list[str],
    clipped: float | None,
    device: str,
    threads: int,
    repeat: int,
) -> list[dict[str, Any]]:
    timings = []
    for dtype in dtypes:
        peak = peak_flops(dtype, threads, device)
        settings = (clipped, device, threads, repeat)
        batch = [alone(measure, name, dtype, shape, *settings) for shape in shapes for name in names]
        for row in batch:
            row["fma_peak_share"] = 6 * row["T"] * row["H"] * row["V"] / row["seconds"] / peak
        timings += batch
        print(f"{dtype}: peak of multiply-adds {peak / 1e9:.0f} GFLOP/s on {threads} threads or the GPU")
    return timings


def main() -> None:
    parser = options(__doc__, quick="the small shape alone", repeat=3, repeats="timed calls per row")
    parser.add_argument("--shapes", nargs="+", type=int, choices=range(len(SHAPES)), help="numbers in SHAPES")
    parser.add_argument("--impl", nargs="+", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32"])
    parser.add_argument("--clipped", type=float, metavar="SHARE", help="set the share of clipped tokens")
    add_device(parser)
    args = parser.parse_args()
    shapes = SHAPES[:1] if args.quick else [SHAPES[i] for i in args.shapes or range(5)]  # range(5): all for CPUs
    timings = rows(shapes, args.impl, args.dtypes, args.clipped, args.device, args.threads, args.repeat)
    print("impl            dtype       T     H       V   seconds  extra MiB  peak share        loss  clipped")
    for r in timings:
        print(
            f"{r['impl']:<16}{r['dtype']:<7}{r['T']:>6}{r['H']:>6}{r['V']:>8}{r['seconds']:>10.3f}"
            f"{r['extra_mib']:>11.0f}{r['fma_peak_share']:>12.1%}{r['loss']:>12.6f}{r['clipped']:>9.1%}"
        )
    write_rows(args.json, timings)


if __name__ == "__main__":
    main()
