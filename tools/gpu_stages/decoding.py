"""The attention of one decoding step: N siblings behind one prompt, for csrc's kernel and for plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gpu_stages.common import Job, Row, judged, seconds
from gpu_stages.roofline import bandwidth_of, device_name
from megatron_brorl.ops.backend import backend
from megatron_brorl.ops.decode import PAGE, DecodeOps, Rows
from megatron_brorl.ops.reference.decode import ReferenceDecode

# Siblings, query heads, kv heads, head size, prompt tokens, own tokens; on a GPU those of the 1.5B shape.
SIZES = {"cuda": (512, 12, 2, 128, 512, 512), "cpu": (6, 6, 2, 16, 40, 20)}
GAP = {torch.bfloat16: 1e-2, torch.float32: 1e-5}  # |difference| over |reference|, in the Euclidean norm


def step(device: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> Callable[[DecodeOps], Tensor]:
    """What attends with the ops of a backend; the same values each time."""
    n, heads, kv_heads, dim, prompt, own = sizes
    g = torch.Generator().manual_seed(0)
    of_prompt, of_row = -(-prompt // PAGE), -(-own // PAGE)
    pages, width = of_prompt + n * of_row, -(-dim // PAGE) * PAGE

    def random(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=g).to(device, kind)

    order = torch.randperm(pages, generator=g).int().to(device)
    angle = random(n, dim // 2, kind=torch.float32)
    rows = Rows(
        cos=angle.cos(),
        sin=angle.sin(),
        tables=order[of_prompt:].view(n, of_row),
        lengths=torch.full((n,), own, device=device),
        prompts=torch.zeros(n, dtype=torch.int64, device=device),
        prompt_tables=order[:of_prompt].view(1, of_prompt),
        prompt_lengths=torch.full((1,), prompt, device=device),
    )
    keys, values = random(pages, kv_heads, dim, PAGE), random(pages, kv_heads, PAGE, width)
    qkv = random(n, (heads + 2 * kv_heads) * dim)
    return lambda ops: ops.attend(qkv, None, keys, values, rows, dim**-0.5, heads)


def row(what: str, job: Job) -> Row:
    """csrc's attention against the reference's, and against reading every key and value once."""
    dtype, sizes = torch.bfloat16 if job.device == "cuda" else torch.float32, SIZES[job.device]
    attend = step(job.device, dtype, sizes)
    ways = {"fused": backend("fused", torch.device(job.device)).decode, "reference": ReferenceDecode()}
    results = {name: attend(ops).double() for name, ops in ways.items()}
    apart = float((results["fused"] - results["reference"]).norm() / results["reference"].norm())
    wrong = "" if apart <= GAP[dtype] else f"{apart:.1e} away from the reference"

    taken = {name: seconds(partial(attend, ops), job.device) for name, ops in ways.items()}
    n, heads, kv_heads, dim, prompt, own = sizes
    figures: dict[str, float | int] = {"siblings": n, "heads": heads, "prompt": prompt, "own": own}
    figures |= {"ms": 1000 * taken["fused"], "reference over fused": taken["reference"] / taken["fused"]}
    speed = bandwidth_of(device_name(job.device))
    if speed:
        read = 2 * kv_heads * dim * dtype.itemsize * (prompt + n * own)
        figures["read once of bandwidth"] = read / taken["fused"] / speed
    return judged(what, wrong, **figures)
