#!/usr/bin/env python3
"""What it costs to keep finished rollouts on disk, against sampling them; and to read them again.

    python benchmarks/bench_durable.py [--quick] [--json FILE] [--threads N] [--repeat N] [--folder DIR]

The built-in engine samples N siblings of one prompt with a random model of 4 layers (t4 of bench_common), each of so
many tokens. Then the same rollouts go through rollout.durable from an engine that has them already, so that all of its
time is that of keeping them, and once more into a second process's place, which finds all of them. write_share and
read_share: those times over that of sampling, medians. A larger model makes both smaller.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from bench_common import MODELS, options, write_rows
from safetensors.torch import load_file

from megatron_brorl.checkpoints.random_init import write_random_model
from megatron_brorl.model_shape import WEIGHTS, read_shape
from megatron_brorl.models.hf_names import hf_shapes
from megatron_brorl.ops.fused.decode import FusedDecode
from megatron_brorl.ops.fused.sampling import sample_tokens
from megatron_brorl.rollout.durable import DurableRollouts
from megatron_brorl.rollout.engine import Request, Sampling
from megatron_brorl.rollout.native.engine import TorchEngine
from megatron_brorl.rollout.watchdog import GenerationResult
from megatron_brorl.types import Prompt, Rollout


class Given:
    """In a watchdog's place: delivers rollouts that were sampled before."""

    def __init__(self, rollouts: list[list[Rollout]]) -> None:
        self.rollouts = rollouts

    def generate(
        self, requests: Sequence[Request], _: Sampling, finished: Callable[[int, Rollout], None], supply: None
    ) -> Any:
        if not requests:
            return GenerationResult([], [], 0)
        for i, rollouts in enumerate(self.rollouts):
            for rollout in rollouts:
                finished(i, rollout)
        return GenerationResult(list(requests), self.rollouts, 0)


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds and the result."""
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def measure(tokens: int, siblings: int, repeat: int, folder: Path) -> dict[str, Any]:
    """The row of one response length."""
    model = folder / "model"
    write_random_model(MODELS["t4"], model, seed=0)
    shape = read_shape(model)
    engine = TorchEngine(
        shape, hf_shapes(shape), torch.device("cpu"), torch.float32, 2048, sample_tokens, FusedDecode()
    )
    engine.update_weights(load_file(model / WEIGHTS).items(), 0)

    # No stop token: all responses have the length that is asked for.
    sampling = Sampling(1.0, 1.0, 0, tokens, ())
    requests = [Request(Prompt("p", "", tuple(range(3, 131)), None, "exact"), 1, siblings)]
    rounds: list[tuple[float, float, float]] = []
    for number in range(repeat):
        sample, rollouts = timed(lambda: engine.generate(requests, sampling))
        place, given = folder / str(number), Given(rollouts)

        def through(place: Path = place, given: Given = given) -> int:
            durable = DurableRollouts(place, 0, "")
            durable.begin(0, 0)
            durable.generate(given, requests, sampling, lambda *_: None)  # type: ignore[arg-type]
            return durable.take_recovered()

        write, none = timed(through)
        read, found = timed(through)
        assert (none, found) == (0, siblings)
        rounds.append((sample, write, read))

    sample, write, read = (statistics.median(times) for times in zip(*rounds, strict=True))
    micro = 1e6 / siblings
    return {
        "tokens": tokens,
        "sample_us": sample * micro,
        "write_us": write * micro,
        "read_us": read * micro,
        "write_share": write / sample,
        "read_share": read / sample,
    }


def main() -> None:
    parser = options(__doc__, "short responses and few of them", 3, "rounds")
    parser.add_argument("--folder", type=Path, default=Path("."), help="on the disk to measure")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    siblings, lengths = (32, [16]) if args.quick else (256, [16, 128])

    rows = []
    print(f"{siblings} siblings; microseconds per rollout")
    print(" tokens    sample     write      read  write/sample  read/sample")
    for tokens in lengths:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            row = measure(tokens, siblings, args.repeat, Path(folder))
        rows.append(row)
        print(
            f"{tokens:7d} {row['sample_us']:9.0f} {row['write_us']:9.1f} {row['read_us']:9.1f} "
            f"{row['write_share']:13.3%} {row['read_share']:12.3%}"
        )
    write_rows(args.json, rows)


if __name__ == "__main__":
    main()
