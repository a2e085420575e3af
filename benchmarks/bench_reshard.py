#!/usr/bin/env python3
"""Bytes per second and memory of a weight sync (actor to engine) and of the conversion of a checkpoint.

    python benchmarks/bench_reshard.py [--quick] [--json FILE] [--model 30m | 1.5b] [--dir DIR] [--repeat N]

Weight sync: a Qwen2 of 31 million parameters in fp32, on one process, two tensor ranks and two stages; seconds are the
median over updates after the first, of the slowest rank, from the actor's parameters to an engine that can generate.
Conversion: random weights in bf16 (1.5b has the configuration of Qwen2.5-1.5B, 3.1 GB), to Megatron for two tensor
ranks, to Megatron for one, and back; the result is compared bit by bit. The copies are written to DIR and deleted.
extra MiB is the growth of the resident set at its peak; peak is that of the whole process, imports included.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import socket
import statistics
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from bench_common import alone, qwen2_config, write_random_model
from measure import peak_mib, timed

from megatron_brorl.checkpoints.hugging_face import Checkpoint
from megatron_brorl.checkpoints.safetensors_files import INDEX

# Megatron is imported only where it is needed: every child process imports this file, and its peak MiB counts imports.

MIB = 1 << 20
SPECIAL_IDS = {"bos_token_id": 0, "eos_token_id": 1}
MODELS = {
    "30m": qwen2_config(hidden=512, layers=8, heads=8, kv_heads=2, ffn=1408, vocab=16384, context=2048) | SPECIAL_IDS,
    "1.5b": qwen2_config(hidden=1536, layers=28, heads=12, kv_heads=2, ffn=8960, vocab=151936, context=131072)
    | SPECIAL_IDS,
}


def weight_sync_rank(
    rank: int, world: int, port: int, directory: str, tensor: int, pipeline: int, repeat: int
) -> list[Any]:
    """Return one rank's (seconds, extra MiB) of each update, and the bytes of the weights."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    warnings.simplefilter("ignore")
    from megatron_brorl.config.schema import ParallelConfig
    from megatron_brorl.families.shape import read_shape
    from megatron_brorl.models.weights.names import hf_shapes
    from megatron_brorl.ops.backend import backend
    from megatron_brorl.ops.reference.sampling import sample_tokens
    from megatron_brorl.parallel import cpu_bridge, grid
    from megatron_brorl.rollout.native.torch_engine import TorchEngine
    from megatron_brorl.train.weight_sync import sync_weights
    from megatron_brorl.train.worker import StageOptions, Worker

    shape = read_shape(directory)
    device = cpu_bridge.default_device()
    options = StageOptions(tokens_per_micro_batch=1024, ops=backend("fused", device))
    worker = Worker(shape, grid.build(ParallelConfig(tensor=tensor, pipeline=pipeline)), options)
    worker.load_hf(directory)
    engine = TorchEngine(shape, hf_shapes(shape), device, torch.float32, max_rows=64, sample=sample_tokens)
    rows = []
    for version in range(1 + repeat):
        rows.append(timed(lambda version=version: sync_weights(worker, engine, version))[:2])  # type: ignore[misc]
    size = 4 * sum(torch.Size(s).numel() for s in hf_shapes(shape).values())
    grid.leave()
    return [rows[1:], size]  # The first update warms up.


def weight_sync_row(directory: str, tensor: int, pipeline: int, repeat: int) -> dict[str, Any]:
    world = tensor * pipeline
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with ProcessPoolExecutor(world, mp_context=multiprocessing.get_context("spawn")) as pool:
        ranks = [
            pool.submit(weight_sync_rank, rank, world, port, directory, tensor, pipeline, repeat)
            for rank in range(world)
        ]
        results = [r.result() for r in ranks]
    seconds = max(statistics.median(s for s, _ in rows) for rows, _ in results)
    return {
        "what": "weight_sync",
        "layout": f"tensor {tensor} x pipeline {pipeline}",
        "bytes": results[0][1],
        "seconds": seconds,
        "extra_mib": max(extra for rows, _ in results for _, extra in rows),
    }


def conversion(args: tuple[str, str, int]) -> dict[str, Any]:
    """Convert a checkpoint. args: source, target, tensor ranks (0 = to a Hugging Face directory)."""
    source, target, tensor = args
    warnings.simplefilter("ignore")
    from megatron_brorl.checkpoints import convert
    from megatron_brorl.checkpoints.megatron_format import METADATA

    is_megatron = (Path(source) / METADATA).is_file()
    size = 0

    def run() -> None:
        nonlocal size
        opened = convert.open_megatron(Path(source), config=None) if is_megatron else convert.open_hf(Path(source))
        if tensor:
            size = convert.to_megatron(*opened, Path(target), tensor, pipeline=1, report=lambda *_: None)
        else:
            size = convert.to_hf(*opened, Path(target), report=lambda *_: None)

    seconds, extra, _ = timed(run)
    peak = peak_mib()
    return {"bytes": size, "seconds": seconds, "extra_mib": extra, "peak_mib": peak, "peak_share": peak * MIB / size}


def make(args: tuple[str, str, str]) -> None:
    """Write a model with random weights. args: its name, the directory, the dtype."""
    model, directory, dtype = args
    warnings.simplefilter("ignore")
    config = MODELS[model] | {"dtype": dtype}
    write_random_model(config, Path(directory), seed=0, dtype=getattr(torch, dtype), defaults=False)


def same(first: Path, second: Path) -> bool:
    """Return whether two Hugging Face directories have the same bits, with one tensor in memory at a time."""
    a = Checkpoint(first)
    b = Checkpoint(second)
    equal = (torch.equal(a.tensor(n).view(torch.uint8), b.tensor(n).view(torch.uint8)) for n in a.files)
    same_format = (first / INDEX).is_file() == (second / INDEX).is_file()  # only sharded checkpoints have an index
    return same_format and a.files.keys() == b.files.keys() and all(equal)


def show(row: dict[str, Any]) -> None:
    speed = row["bytes"] / row["seconds"] / 1e9
    line = f"{row['what']:<18}{row['layout']:<24}{row['bytes'] / 1e6:>9.0f}{row['seconds']:>9.3f}{speed:>8.2f}"
    line += f"{row['extra_mib']:>11.0f}"
    if "peak_mib" in row:
        line += f"{row['peak_mib']:>10.0f}{row['peak_share']:>12.2f}"
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small model only, two updates")
    parser.add_argument("--json", type=Path, help="write the rows here as a JSON list")
    parser.add_argument("--model", choices=MODELS, default="1.5b", help="the model to convert (%(default)s)")
    parser.add_argument("--dir", type=Path, help="where to write the copies; default: the system's temporary folder")
    parser.add_argument("--repeat", type=int, default=9, help="timed updates (%(default)s)")
    args = parser.parse_args()
    repeat, model = (2, "30m") if args.quick else (args.repeat, args.model)
    rows: list[dict[str, Any]] = []
    print("what              layout                         MB  seconds    GB/s  extra MiB  peak MiB  peak/model")

    # All files are below one folder, which is always deleted.
    root = Path(tempfile.mkdtemp(dir=args.dir))
    try:
        small = str(root / "small")
        alone(make, "30m", small, "float32")
        for tensor, pipeline in ((1, 1), (2, 1), (1, 2)):
            rows.append(weight_sync_row(small, tensor, pipeline, repeat))
            show(rows[-1])

        # (direction, source, target, tensor ranks): to Megatron, to another layout and back, each in a fresh process.
        alone(make, model, str(root / "hf"), "bfloat16")
        steps = [("to-megatron", "hf", "a", 2), ("to-megatron", "a", "b", 1), ("to-hf", "b", "back", 0)]
        for what, source, target, tensor in steps:
            layout = {"hf": "from HF", "a": "from tensor 2", "b": "from tensor 1"}[source]
            layout += f" to tensor {tensor}" if tensor else " to HF"
            row = {"what": what, "layout": layout, "model": model}
            rows.append(row | alone(conversion, str(root / source), str(root / target), tensor))
            show(rows[-1])
            if source != "hf":
                shutil.rmtree(root / source)

        # A fast conversion that loses a bit does not count.
        exact = same(root / "hf", root / "back")
        print(f"bit by bit the same after both ways: {exact}")
        rows.append({"what": "round trip", "model": model, "exact": exact})
        if not exact:
            raise SystemExit(1)
    finally:
        shutil.rmtree(root)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
