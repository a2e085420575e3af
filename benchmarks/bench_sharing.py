#!/usr/bin/env python3
"""One optimizer step over N siblings of one prompt, each with its own copy of it and with one copy for all.

    python benchmarks/bench_sharing.py [--quick] [--json FILE] [--threads N] [--repeat N]

The model is t4 of bench_common (4 layers, hidden 256, vocabulary 4096, random weights); responses have 64 tokens. Both
ways run in one process: the median of the seconds after a first step. token_gain is the ratio of the tokens that pass
the model.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from bench_common import options, write_model, write_rows

from megatron_brorl.config.schema import AlgoConfig, OptimConfig, ParallelConfig
from megatron_brorl.model_shape import read_shape
from megatron_brorl.ops.backend import backend
from megatron_brorl.parallel import device, grid
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.train.update import update_policy
from megatron_brorl.train.worker import StageOptions, Worker
from megatron_brorl.types import Experience

RESPONSE = 64


def siblings(vocab: int, prompt: int, n: int, response: int) -> Experience:
    """One prompt of so many tokens and its n siblings, drawn at random: only the amount of work counts."""
    g = torch.Generator().manual_seed(0)
    text = torch.randint(0, vocab, (prompt,), generator=g)
    responses = tuple(torch.randint(0, vocab, (response,), generator=g) for _ in range(n))
    sampled = tuple(torch.full((response,), -math.log(vocab)) for _ in range(n))
    advantages = tuple(torch.randn(n, generator=g)[:, None].expand(n, response))
    return Experience((text,) * n, responses, sampled, None, advantages)


def measure(directory: str, processes: Grid, prompt: int, n: int, share: bool, repeat: int) -> dict[str, Any]:
    optim = OptimConfig()
    options = StageOptions(16384, backend("fused", device.default_device()), share_prompt=share)
    worker = Worker(read_shape(directory), processes, options, optim)
    worker.load_hf(directory)

    # The first update warms up.
    experience = siblings(worker.shape.vocab, prompt, n, RESPONSE)
    tokens, seconds = worker.tokens(experience.prompts, experience.responses), []
    for update in range(1 + repeat):
        start = time.perf_counter()
        update_policy(worker, experience, [list(range(n))], AlgoConfig(), optim, 1.0, update)
        seconds.append(time.perf_counter() - start)
    return {
        "prompt": prompt,
        "n": n,
        "response": RESPONSE,
        "share_prompt": share,
        "threads": torch.get_num_threads(),
        "seconds": statistics.median(seconds[1:]),
        "token_gain": tokens["plain"] / tokens["computed"],
    }


def main() -> None:
    args = options(__doc__, "64 siblings instead of 512", 2, "timed steps per row").parse_args()
    torch.set_num_threads(args.threads)
    processes, rows = grid.build(ParallelConfig()), []
    print("prompt     N  shared   seconds    gain  token gain")
    with tempfile.TemporaryDirectory() as directory:
        write_model("t4", Path(directory))
        for prompt in (64, 256):
            pair = [
                measure(directory, processes, prompt, 64 if args.quick else 512, s, args.repeat) for s in (False, True)
            ]
            for row in pair:
                gain = pair[0]["seconds"] / row["seconds"]
                shared = "yes" if row["share_prompt"] else "no"
                print(
                    f"{prompt:>6}{row['n']:>6}{shared:>8}{row['seconds']:>10.2f}{gain:>8.2f}{row['token_gain']:>12.2f}"
                )
            rows += pair
    write_rows(args.json, rows)
    grid.leave()


if __name__ == "__main__":
    main()
