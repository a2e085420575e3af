#!/usr/bin/env python3
"""Seconds and memory of one policy update: full training next to LoRA, shared prompts or FP8, in one run.

    python benchmarks/bench_update.py [--quick] [--json FILE] [--model 135m] [--dtype fp32] [--prompt 64]
                                      [--response 64] [--n 16] [--tokens-per-micro-batch 2048]
                                      [--variants full lora:16 shared fp8:tensorwise] [--without-te] [--device cuda]
                                      [--threads N] [--repeat N]

An update is one optimizer step on N random responses to one random prompt, by a model of bench_common with random
weights. Every row is a fresh process that takes one update to warm up and then three. Seconds are the median of these.
Rows of different variants alternate --repeat times. "full" trains all weights and shares no prompts, "shared" shares
prompts, "lora:16" trains adapters of rank 16, and "fp8:RECIPE" is for Transformer Engine, which --without-te hides from
all variants.
state_mb: weights, gradients and optimizer. tflops: 6 operations for each weight of the layers' matrices per token, and
for each weight of the LM head per response token; nothing for attention.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from bench_common import DTYPES, MODELS, add_device, alone, options, write_model, write_rows
from measure import peak_mib

UPDATES = 3


def measure(args: tuple[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of a variant."""
    (job,) = args
    if job["without_te"]:
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # so that its import fails
    from megatron_brorl.config.schema import AlgoConfig, Fp8Config, LoraConfig, OptimConfig, ParallelConfig
    from megatron_brorl.families.shape import read_shape
    from megatron_brorl.models import fp8
    from megatron_brorl.ops.backend import backend
    from megatron_brorl.parallel import cpu_bridge, grid
    from megatron_brorl.parallel.flops import layer_weights
    from megatron_brorl.train.update import update_policy
    from megatron_brorl.train.worker import StageOptions, Worker
    from megatron_brorl.types import Experience

    torch.set_num_threads(job["threads"])
    device = cpu_bridge.default_device()
    kind, _, value = job["variant"].partition(":")
    shape = read_shape(job["model"])
    fp8_config = Fp8Config(recipe=value if kind == "fp8" else "none")
    options = StageOptions(
        tokens_per_micro_batch=job["tokens_per_micro_batch"],
        ops=backend("fused", device),
        dtype=DTYPES[job["dtype"]],
        share_prompt=kind == "shared",
        fields=fp8.settings(fp8_config),
        lora=LoraConfig(rank=int(value)) if kind == "lora" else None,
    )
    optim = OptimConfig(lr=1e-5)
    worker = Worker(shape, grid.build(ParallelConfig()), options, optim)
    worker.load_hf(job["model"])

    draw = torch.Generator().manual_seed(0)
    prompt = torch.randint(shape.vocab, (job["prompt"],), generator=draw)
    responses = torch.randint(shape.vocab, (job["n"], job["response"]), generator=draw).unbind()
    prompts = (prompt,) * job["n"]
    old = tuple(worker.log_probs(prompts, responses, temperature=1.0))
    advantages = tuple(x.expand(job["response"]) for x in torch.linspace(-1, 1, job["n"]))
    experience = Experience(prompts, responses, rollout_log_probs=old, old_log_probs=None, advantages=advantages)

    durations = []
    for update in range(1 + UPDATES):
        cpu_bridge.wait()
        begun = time.perf_counter()
        update_policy(
            worker, experience, [list(range(job["n"]))], AlgoConfig(), optim, temperature=1.0, first_update=update
        )
        cpu_bridge.wait()
        durations.append(time.perf_counter() - begun)

    state = [*worker.actor.parameters(), *worker._gradient_buffers(), *worker._optimizer_tensors()]
    # Tensors may share a storage. Those with one element are step counters.
    state_bytes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in state if x.numel() > 1}
    seconds = statistics.median(durations[1:])
    tokens = job["n"] * (job["prompt"] + job["response"])
    multiply_adds = layer_weights(shape) * tokens + shape.vocab * shape.hidden * job["n"] * job["response"]
    return {
        "variant": job["variant"],
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "tflops": 6 * multiply_adds / seconds / 1e12,
        "state_mb": sum(state_bytes.values()) / 1e6,
        "peak_mib": peak_mib(job["device"]),
    }


def main() -> None:
    parser = options(__doc__, quick="the smallest model, one round", repeat=3, repeats="rounds")
    parser.add_argument("--model", choices=MODELS, default="135m")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--response", type=int, default=64, help="tokens")
    parser.add_argument("--n", type=int, default=16, help="responses")
    parser.add_argument("--tokens-per-micro-batch", type=int, default=2048)
    parser.add_argument("--variants", nargs="+", default=["full", "lora:16"])
    parser.add_argument("--without-te", action="store_true", help="hide Transformer Engine")
    add_device(parser)
    args = parser.parse_args()
    if args.quick:
        args.model, args.repeat = "t4", 1
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        write_model(args.model, Path(directory))
        for _ in range(args.repeat):
            for variant in args.variants:
                rows.append(alone(measure, vars(args) | {"variant": variant, "model": directory}))
                shown = (f"{k} {v if isinstance(v, str) else f'{v:,.3f}'}" for k, v in rows[-1].items())
                print("  ".join(shown), flush=True)
    for variant in args.variants:
        seconds = [row["seconds"] for row in rows if row["variant"] == variant]
        baseline = [row["seconds"] for row in rows if row["variant"] == args.variants[0]]
        ratio = statistics.median(seconds) / statistics.median(baseline)
        print(f"{variant}: {statistics.median(seconds):.3f} s, {ratio:.2f} of {args.variants[0]}")
    write_rows(args.json, rows)


if __name__ == "__main__":
    main()
