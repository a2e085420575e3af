"""(b) Speed of csrc's kernels, between CUDA events: against three products, against others' code, against a copy."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from bench_ops import IMPLEMENTATIONS, LIMITS, Inputs, make_inputs

from gpu_stages.common import Job, Row, apart, attempt, has, judged, left_out, missing, ok, peak_mib, seconds
from gpu_stages.roofline import device_name, mfu

LENGTH = 512
LOSS = {"cuda": (32768, 1536, 151936), "cpu": (256, 64, 1031)}  # T, H, V
COMPARED = ("fused", "compile_chunked", "liger_like")  # of bench_ops.IMPLEMENTATIONS
NEEDS_COMPILER = ("compile_chunked",)
GAP = {"bf16": 0.02, "fp32": 1e-4}  # of two ways to one loss; in bf16 the others round their logits


def run(job: Job) -> Iterator[Row]:
    """The rows of this stage."""
    yield from _losses(job)


def _losses(job: Job) -> Iterator[Row]:
    """Of every implementation, with the seconds of three products as the measure."""
    t, h, v = LOSS[job.device]
    inputs, clipped = make_inputs(job.dtype, (t, h, v), 0.0, job.device)
    products = seconds(partial(_three_products, inputs), job.device)
    yield ok("three torch.mm", **_figures(products, products, job), T=t, H=h, V=v, dtype=job.dtype)

    # This project's loss comes first, and the others are compared with it.
    found: dict[str, float] = {}
    for name in COMPARED:
        what = f"linear_ppo_loss forward and backward, {name}"
        if job.dry and name in NEEDS_COMPILER:
            yield left_out(what, "dry mode: the compiler takes longer than all else")
            continue
        yield attempt(what, partial(_loss, what, name, inputs, products, found, job, clipped))

    what = "linear_ppo_loss forward and backward, Liger"
    if not has("liger_kernel"):
        yield missing(what, "pip install liger-kernel")
    elif job.dry:
        yield left_out(what, "dry mode")
    else:
        yield attempt(what, partial(_liger, what, inputs, products, job))


def _three_products(inputs: Inputs) -> None:
    """What forward and backward cannot do without: logits, and the gradients of hidden states and weight."""
    hidden, weight = (x.detach() for x in inputs[:2])
    logits = torch.mm(hidden, weight.t())
    torch.mm(logits, weight)
    torch.mm(logits.t(), hidden)


def _figures(taken: float, products: float, job: Job) -> dict[str, Any]:
    """Milliseconds, their multiple of three products, and the share of the device's peak that 6 T H V comes to."""
    t, h, v = LOSS[job.device]
    share = mfu(6.0 * t * h * v, taken, device_name(job.device))
    return {"ms": 1000 * taken, "over three products": taken / products} | ({"of peak": share} if share else {})


def _loss(
    what: str, name: str, inputs: Inputs, products: float, found: dict[str, float], job: Job, clipped: float
) -> Row:
    call = IMPLEMENTATIONS[name]()

    def once() -> float:
        inputs[0].grad = inputs[1].grad = None
        return call(*inputs)

    # The memory is that of a call that has warmed up; its loss is the one to compare.
    found[name] = once()
    taken, peak = seconds(once, job.device), peak_mib(once, job.device)
    gap = apart(found[name], found.get("fused", found[name]))
    wrong = f"its loss is {found[name]:.6f}, that of fused {found['fused']:.6f}" if gap > GAP[job.dtype] else ""
    figures = _figures(taken, products, job) | {"loss": found[name], "clipped": clipped}
    return judged(what, wrong, **figures, **({} if peak is None else {"extra MiB": peak}))


def _liger(what: str, inputs: Inputs, products: float, job: Job) -> Row:
    """Liger-Kernel's own, in sequences of 512 with one advantage each; without importance weights, which it has not."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    hidden, weight, ids, old, _, advantages = inputs
    rows, limits = len(ids) // LENGTH, {"epsilon_low": LIMITS[0], "epsilon_high": LIMITS[1]}
    loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="bnpo", chunk_size=4, **limits)
    mask = torch.ones(rows, LENGTH, device=hidden.device)

    def once() -> None:
        hidden.grad = weight.grad = None
        given = hidden.view(rows, LENGTH, -1), weight, ids.view(rows, LENGTH), mask, advantages[:rows]
        value = loss(*given, old_per_token_logps=old.view(rows, LENGTH))
        (value[0] if isinstance(value, tuple) else value).backward()

    taken = seconds(once, job.device)
    return ok(what, **_figures(taken, products, job), **{"extra MiB": peak_mib(once, job.device)})
