#!/usr/bin/env python3
"""csrc's ops on each set of kernels that this processor runs, and whether the results have the same bits.

    python benchmarks/bench_levels.py [--quick] [--json FILE] [--threads N] [--repeat N] [--native FOLDER]

Needs a build for any processor (`make wheel`, installed). --native: a folder that has megatron_brorl built for this
processor, by make, to compare with. A process per set holds the same inputs, and they take turns op by op, so that
what else the machine does falls on all of them: `ratio` is the median over the turns of a set's seconds to those of
the best set, `same_bits` whether its result is the best set's. Linux only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_common import options, write_rows
from torch import Tensor

from megatron_brorl.errors import UserError
from megatron_brorl.ops.fused import native, processor

Op = Callable[[], tuple[Tensor, ...]]


def ops() -> dict[str, Op]:
    """The ops with their inputs, by name; each call begins with the same numbers."""
    b, g = torch.ops.brorl, torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=g)

    # A vocabulary of 32,000, hidden states of 256.
    hidden, weight, logits = random(512, 256), random(256, 32000), torch.empty(512, 32000)
    ids, index = torch.randint(0, 32000, (512,), generator=g), torch.arange(512)
    sampled = random(256, 32000)
    turn = index[:256]

    # A packed stream of a prompt and its siblings, 4 query heads over 2 of keys and values.
    qkv, gradient = random(1152, 2, 4, 64), random(1152, 2, 2, 64)
    segments = torch.tensor([[0, 128, 0, 0], *([128 + 128 * i, 128, 0, 128] for i in range(8))])
    attended = b.segment_attention(qkv, segments, 0.125)
    rows, norm, gate_up, up = random(4096, 512), random(512), random(4096, 1024), random(4096, 512)

    # 64 siblings that decode, their 40 tokens behind a prompt of 512.
    step, keys, values = random(64, 512), random(288, 2, 64, 16), random(288, 2, 16, 64)
    tables = (32 + torch.arange(256, dtype=torch.int32)).view(64, 4)
    prompt = (torch.arange(32, dtype=torch.int32)[None], torch.tensor([512]), torch.zeros(64, dtype=torch.long))
    angles, lengths = random(64, 32), torch.full((64,), 40)

    def product() -> tuple[Tensor, ...]:
        b.gemm_(logits, hidden, weight, False)
        return (logits,)

    def decode() -> tuple[Tensor, ...]:
        out = torch.empty(64, 256)
        own = (None, None, 1e-6, angles.cos(), angles.sin(), keys, values, tables, lengths)
        b.decode_attention_(step, *own, *prompt, 0.125, out)
        return (out,)

    def swiglu_gradient() -> tuple[Tensor, ...]:
        both = up.clone(), gate_up.clone()
        b.silu_mul_gradient_(*both)
        return both

    def advantages() -> tuple[Tensor, ...]:
        both = torch.empty(512 * 512), torch.empty(512 * 512)
        starts = torch.arange(513) * 512
        b.gae_(sampled.view(-1)[: 512 * 512], sampled.view(-1)[-512 * 512 :], starts, None, None, 0.99, 0.95, *both)
        return both

    return {
        "product": product,
        "softmax": lambda: (b.softmax_statistics(logits, ids, 0, 1.0),),
        "sampler": lambda: b.sample_tokens(sampled, turn, turn, turn, 1.0, 1.0, 0),
        "sampler, top-p": lambda: b.sample_tokens(sampled, turn, turn, turn, 1.0, 0.9, 0),
        "attention": lambda: b.segment_attention(qkv, segments, 0.125),
        "its gradient": lambda: (b.segment_attention_gradient(gradient, qkv, *attended, segments, 0.125),),
        "decode attention": decode,
        "norm": lambda: b.rms_norm(rows, norm, 1e-6),
        "SwiGLU": lambda: (b.silu_mul(gate_up),),
        "its gradient ": swiglu_gradient,
        "advantages": advantages,
    }


def serve(threads: int) -> None:
    """As the process of a set: the name of an op on standard input, seconds and bits on standard output."""
    torch.set_num_threads(threads)
    found = ops()
    print(json.dumps([native.PROCESSOR, list(found)]), flush=True)
    for line in sys.stdin:
        op = found[line.rstrip("\n")]
        begun = time.perf_counter()
        result = op()
        seconds = time.perf_counter() - begun
        digest = hashlib.sha256(b"".join(x.contiguous().numpy().tobytes() for x in result)).hexdigest()
        print(json.dumps([seconds, digest]), flush=True)


class Process:
    """A set of kernels in a process of its own."""

    def __init__(self, threads: int, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(threads)],
            env={**os.environ, "OMP_WAIT_POLICY": "passive", **environment},  # who waits takes nothing from the others
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.processor, self.names = self._answer()

    def ask(self, name: str) -> tuple[float, str]:
        """Seconds of one call, and the hash of its result."""
        assert self.process.stdin is not None
        self.process.stdin.write(name + "\n")
        self.process.stdin.flush()
        seconds, digest = self._answer()
        return seconds, digest

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


def processes(args: argparse.Namespace) -> list[Process]:
    """One per level that this processor runs, the best first; then the build for it alone."""
    found = []
    for level in processor.LEVELS:
        try:
            processor.chosen(processor.built(), level)
        except UserError as refusal:
            print(f"bench_levels: {refusal}")
            continue
        found.append(Process(args.threads, BRORL_CPU=level))
    if args.native:
        found.append(Process(args.threads, PYTHONPATH=str(args.native)))
    return found


def turn(sets: list[Process], name: str, number: int) -> list[float]:
    """Seconds of a call in each; another one begins in every turn."""
    seconds = {}
    for i in range(len(sets)):
        at = (i + number) % len(sets)
        seconds[at] = sets[at].ask(name)[0]
    return [seconds[i] for i in range(len(sets))]


def main() -> None:
    parser = options(__doc__, "one turn", 15, "turns of every op")
    parser.add_argument("--native", type=Path, help="folder with megatron_brorl built for this processor")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return

    # Two calls that warm up, then turns.
    sets = processes(args)
    if not sets:
        return
    rows = []
    print(f"{'op':18}{'processor':16}{'ms':>9}{'ratio':>8}  same bits")
    for name in sets[0].names:
        bits = [[s.ask(name) for s in sets] for _ in range(2)][-1]
        turns = [turn(sets, name, t) for t in range(1 if args.quick else args.repeat)]
        for i, s in enumerate(sets):
            ratio = statistics.median(t[i] / t[0] for t in turns)
            milliseconds = 1e3 * statistics.median(t[i] for t in turns)
            same = bits[i][1] == bits[0][1]
            rows.append({"op": name, "processor": s.processor, "ms": milliseconds, "ratio": ratio, "same_bits": same})
            print(f"{name:18}{s.processor:16}{milliseconds:9.3f}{ratio:8.2f}  {'yes' if same else 'no'}")
    write_rows(args.json, rows)


if __name__ == "__main__":
    main()
