#!/usr/bin/env python3
"""Simulate a training step in turns on all GPUs, and ahead on separate GPUs for generation and training.

    python benchmarks/bench_ahead.py [--quick] [--gpus G] [--rollouts R ...] [--mean TOKENS] [--json FILE]

In turns, all GPUs generate, switch, and train. Ahead, some GPUs generate the next step while the others train, at the
best split, and a step takes as long as the slower side. Lengths are log-normal (standard deviation 0.6 of the
logarithm), cut off at --longest, with the mean --mean. Every engine takes the next rollout from one queue as soon as a
row is free. A decoding step of r rows takes STEP_S + ROW_S x r seconds. Training scales linearly with its GPUs.

Column "tail" is the share of generation after the last response has begun. The two columns "continued" have no tail:
unfinished responses continue in the next step with newer weights (rollout.partial_tokens, or an asynchronous
framework), so that all rows of all engines are always in use. Speeds are relative to "in turns".
"""

from __future__ import annotations

import argparse
import heapq
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from bench_common import write_rows

# Estimates for 1.5B weights in bf16 on an H100 or H200.
STEP_S = 0.006  # the constant part of a decoding step: 3 GB of weights at 3 to 4 TB/s, and kernel launches
ROW_S = 6e-5  # the part of each row in a decoding step: keys and values of 5,000 tokens at 28 kB, and sampling
SWITCH_S = 15.0  # between generation and training in turns, to load the weights, the engine's memory and its graphs
WEIGHTS_S = 3.0  # the transfer of the weights to the engines, if generation runs ahead
# Response tokens per second and GPU. Measured: 32,768 tokens in 1.077 s of update and 0.289 s of log-probs, at 512
# tokens per response (docs/measurements.md, 2026-11-26). At 9,000 tokens, attention adds about 26% to the operations.
TRAIN_RATE = 32768 / (1.077 + 0.289) / 1.26
SPREAD = 0.6  # standard deviation of the logarithm of a length


def lengths(count: int, mean: float, longest: int, rng: np.random.Generator) -> np.ndarray:
    """Return response lengths [count] whose expected value after the cut is `mean`, in tokens."""
    normal = rng.standard_normal(count)
    # Find the logarithm of the median by bisection, with the mean of a large sample as the expected value.
    sample = np.random.default_rng(0).standard_normal(100_000)
    low, high = np.log(mean) - 2, np.log(mean) + 4
    for _ in range(50):
        log_median = (low + high) / 2
        if np.exp(log_median + SPREAD * sample).clip(1, longest).mean() < mean:
            low = log_median
        else:
            high = log_median
    return np.exp(low + SPREAD * normal).clip(1, longest).astype(np.int64)


def generation(tokens: np.ndarray, engines: int, rows: int) -> tuple[float, float]:
    """Return the seconds until all responses are complete, and until the last one has begun. tokens: of each response.

    engines: their number. rows: responses that an engine decodes at a time."""
    queue = deque(tokens.tolist())
    clock = [0.0] * engines  # seconds
    steps = [0] * engines  # decoding steps until `clock`
    running: list[list[int]] = [[] for _ in range(engines)]  # heaps of the step at which each row ends
    events: list[tuple[float, int]] = []  # the next end of a row on each engine
    last_start = 0.0

    def fill(engine: int) -> None:
        nonlocal last_start
        ends = running[engine]
        while queue and len(ends) < rows:
            heapq.heappush(ends, steps[engine] + queue.popleft())
            last_start = clock[engine]
        if ends:
            seconds = (ends[0] - steps[engine]) * (STEP_S + ROW_S * len(ends))
            heapq.heappush(events, (clock[engine] + seconds, engine))

    for engine in range(engines):
        fill(engine)
    while events:
        now, engine = heapq.heappop(events)
        ends = running[engine]
        clock[engine] = now
        steps[engine] = ends[0]
        while ends and ends[0] == steps[engine]:
            heapq.heappop(ends)
        fill(engine)
    return max(clock), last_start


def measure(gpus: int, rollouts: int, mean: float, longest: int, rows: int) -> dict[str, Any]:
    """Return one row of the table."""
    tokens = lengths(rollouts, mean, longest, np.random.default_rng(rollouts))
    generate_s, last_start_s = generation(tokens, gpus, rows)
    train_s = tokens.sum() / TRAIN_RATE / gpus
    turns_s = generate_s + train_s + SWITCH_S

    def best_split(seconds_on: Callable[[int], float]) -> tuple[float, int]:
        """Return the seconds of a step ahead, and its GPUs for generation. seconds_on: of generation on g GPUs."""
        return min((max(seconds_on(g), train_s * gpus / (gpus - g)) + WEIGHTS_S, g) for g in range(1, gpus))

    busy_s = tokens.sum() * (STEP_S + ROW_S * rows) / rows  # generation on one engine whose rows are all in use
    ahead_s, engines = best_split(lambda g: generation(tokens, g, rows)[0])
    return {
        "rollouts": rollouts,
        "generate_s": generate_s,
        "tail": 1 - last_start_s / generate_s,
        "train_s": train_s,
        "turns_s": turns_s,
        "engines": engines,
        "ahead": turns_s / ahead_s,
        "turns_continued": turns_s / (busy_s / gpus + train_s + SWITCH_S),
        "ahead_continued": turns_s / best_split(lambda g: busy_s / g)[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="512 rollouts only")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument(
        "--rollouts", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384], help="of a step"
    )
    parser.add_argument("--mean", type=float, default=9000, help="tokens of a response")
    parser.add_argument("--longest", type=int, default=15360)
    parser.add_argument("--rows", type=int, default=145, help="that an engine decodes at a time")
    parser.add_argument("--json", type=Path, help="write the rows here as a JSON list")
    args = parser.parse_args()

    print("                                                              speed          continued")
    print("rollouts  generate s  tail  train s  in turns s  engines     ahead     in turns     ahead")
    table = []
    for rollouts in [512] if args.quick else args.rollouts:
        r = measure(args.gpus, rollouts, args.mean, args.longest, args.rows)
        table.append(r)
        print(
            f"{r['rollouts']:>8}{r['generate_s']:>12.0f}{r['tail']:>6.0%}{r['train_s']:>9.0f}{r['turns_s']:>12.0f}"
            f"{r['engines']:>9}{r['ahead']:>10.2f}{r['turns_continued']:>13.2f}{r['ahead_continued']:>10.2f}"
        )
    write_rows(args.json, table)


if __name__ == "__main__":
    main()
