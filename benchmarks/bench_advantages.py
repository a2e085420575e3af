#!/usr/bin/env python3
"""Time of the advantage ops and of the value loss, against plain torch and against copying the memory they touch.

    python benchmarks/bench_advantages.py [--quick] [--json FILE] [--threads N] [--repeat N]

T tokens in segments of 512. Each op, its plain torch version and the copy take turns, so that a change of the machine's
speed meets all three; seconds are medians, after one round that is not counted. copy_ratio is the time over that of
torch.Tensor.copy_ of as many tensors into memory that is already there: one for moments and whiten together (one read,
one write), two for gae (two read, two written) and two for the value loss (four read, one written). What an op returns
is fresh memory on every call, whose first touch is in its time and not in the copy's; the row "clone" is the copy with
it. extra_mib: growth of the resident set at its peak. Linux only.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from bench_common import options, write_rows
from measure import timed
from torch import Tensor

from megatron_brorl.ops.fused.advantages import gae, group_advantages, moments, to_moments, whiten_
from megatron_brorl.ops.fused.value import value_loss

LENGTH = 512
GAMMA, LAM, CLIP = 0.99, 0.95, 0.2
Calls = dict[str, Callable[[], Any]]


def eager_gae(rewards: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """[S, L] at once: segments of one length and no mask, as plain torch would have it."""
    after = torch.cat((values[:, 1:], torch.zeros_like(values[:, :1])), dim=1)
    advantages = rewards + GAMMA * after - values
    for t in reversed(range(rewards.shape[1] - 1)):
        advantages[:, t] += GAMMA * LAM * advantages[:, t + 1]
    return advantages, advantages + values


def eager_whiten(values: Tensor) -> None:
    std, mean = torch.std_mean(values, correction=0)
    values.sub_(mean).div_(std)


def eager_whiten_masked(values: Tensor, mask: Tensor) -> None:
    kept = values[mask]
    std, mean = torch.std_mean(kept, correction=0)
    values.sub_(mean).div_(std).masked_fill_(~mask, 0.0)


def fused_whiten(values: Tensor, mask: Tensor | None) -> None:
    found = to_moments(moments(values, mask))
    whiten_(values, found.mean, found.std, mask)


def eager_groups(rewards: Tensor) -> Tensor:
    return (rewards - rewards.mean(dim=1, keepdim=True)) / (rewards.std(dim=1, keepdim=True) + 1e-6)


def eager_value_loss(v: Tensor, old: Tensor, target: Tensor, weights: Tensor) -> None:
    v.grad = None
    held = torch.clamp(v, old - CLIP, old + CLIP)
    (0.5 * weights * torch.maximum((v - target).square(), (held - target).square())).sum().backward()


def fused_value_loss(v: Tensor, old: Tensor, target: Tensor, weights: Tensor) -> None:
    v.grad = None
    value_loss(v, old, target, weights, CLIP).loss.backward()


def groups_of_calls(tokens: int, device: str = "cpu") -> dict[str, Calls]:
    """Of every op: a copy of what it reads and writes, this project's, and plain torch."""
    g = torch.Generator(device).manual_seed(0)
    a, b, c = (torch.randn(tokens, generator=g, device=device) for _ in range(3))
    x, y = torch.zeros_like(a), torch.zeros_like(a)
    mask = torch.rand(tokens, generator=g, device=device) < 0.9
    starts = torch.arange(0, tokens + 1, LENGTH, device=device)
    weights = mask.float() / tokens
    rows = a.view(-1, LENGTH), b.view(-1, LENGTH)
    work = c.clone()
    leaf = a.clone().requires_grad_()

    def copy_two() -> None:
        x.copy_(a)
        y.copy_(b)

    return {
        "moments + whiten_": {
            "copy": lambda: x.copy_(a),
            "fused": lambda: fused_whiten(work, None),
            "eager": lambda: eager_whiten(work),
        },
        "moments + whiten_, masked": {
            "copy": lambda: x.copy_(a),
            "fused": lambda: fused_whiten(work, mask),
            "eager": lambda: eager_whiten_masked(work, mask),
        },
        "gae": {
            "copy": copy_two,
            "clone": lambda: (a.clone(), b.clone()),
            "fused": lambda: gae(a, b, starts, None, None, GAMMA, LAM),
            "out=": lambda: gae(a, b, starts, None, None, GAMMA, LAM, out=(x, y)),
            "eager": lambda: eager_gae(*rows),
        },
        "gae, masked": {
            "copy": copy_two,
            "fused": lambda: gae(a, b, starts, mask, None, GAMMA, LAM),
            "out=": lambda: gae(a, b, starts, mask, None, GAMMA, LAM, out=(x, y)),
        },
        "group_advantages": {
            "copy": lambda: x.copy_(a),
            "clone": lambda: a.clone(),
            "fused": lambda: group_advantages(a, starts, None, "mean_std"),
            "eager": lambda: eager_groups(rows[0]),
        },
        "value_loss, backward": {
            "copy": copy_two,
            "fused": lambda: fused_value_loss(leaf, b, c, weights),
            "eager": lambda: eager_value_loss(leaf, b, c, weights),
        },
    }


def measure(op: str, calls: Calls, tokens: int, threads: int, repeat: int) -> list[dict[str, Any]]:
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    extra = dict.fromkeys(calls, 0)

    # In turns, so that the machine's moods meet all alike; the first round warms up.
    for i in range(1 + repeat):
        for name, call in calls.items():
            elapsed, grown = timed(call)[:2]
            if i:
                seconds[name].append(elapsed)
                extra[name] = max(extra[name], grown)

    # Over the time of a plain copy, which is the speed of memory.
    copy = statistics.median(seconds["copy"])
    return [
        {
            "op": op,
            "impl": name,
            "dtype": "fp32",
            "T": tokens,
            "H": None,
            "V": None,
            "threads": threads,
            "seconds": statistics.median(found),
            "extra_mib": extra[name] / 1024,
            "gemm_peak_share": None,
            "copy_ratio": statistics.median(found) / copy,
        }
        for name, found in seconds.items()
    ]


def main() -> None:
    args = options(__doc__, "4,096 segments instead of 65,536", 9, "timed rounds").parse_args()
    torch.set_num_threads(args.threads)
    tokens = (4096 if args.quick else 65536) * LENGTH
    found = []
    print(f"{tokens} tokens, float32, {args.threads} threads")
    print("op                        impl      seconds  extra MiB  over copy")
    for op, calls in groups_of_calls(tokens).items():
        for r in measure(op, calls, tokens, args.threads, args.repeat):
            print(
                f"{r['op']:<26}{r['impl']:<7}{r['seconds']:>10.4f}{r['extra_mib']:>11.0f}{r['copy_ratio']:>11.2f}",
                flush=True,
            )
            found.append(r)
    write_rows(args.json, found)


if __name__ == "__main__":
    main()
