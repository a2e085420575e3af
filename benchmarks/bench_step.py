#!/usr/bin/env python3
"""Samples per second and peak memory of a whole training step, of this project and of TRL's GRPOTrainer, in one run.

    python benchmarks/bench_step.py [--quick] [--json FILE] [--model t4] [--n 512] [--groups 1] [--prompts 64 256]
                                    [--response 64] [--dtypes fp32 bf16] [--tokens-per-micro-batch 2048]
                                    [--lora RANK] [--trl-python PYTHON] [--trl-micro-batch 64] [--device cuda]
                                    [--threads N] [--repeat N]

A step samples N responses to each of --groups prompts, scores them, takes one optimizer step and sends the new weights
to the sampler. The model is one of bench_common with random weights, and a tokenizer of one word per token. 1 of 32
words is an answer in tags, so about half of long responses are right, and the reward costs next to nothing on either
side. Most responses end at the length limit. In bf16, this project keeps float32 master weights and sums gradients in
float32; TRL's weights, gradients and optimizer state are all bfloat16. This project runs as `brorl train` in one
process with its defaults except for the options above; its numbers come from metrics.jsonl and summary.json. The first
step warms up; seconds are medians of the others.

peak_mib: resident set of all processes at its peak, libraries included; on this side that counts the scoring processes
and the writing of checkpoint and model. On a GPU, the peak of torch's tensors. fma_peak_share: 8 operations for each
weight of the layers' matrices and the LM head per response token (2 to sample, 6 to train; nothing for the prompt),
against the machine's peak (bench_common.peak_flops). others_cpu_share: the share of the machine that other processes
used during the run; above a few percent, measure again. Linux only.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from itertools import chain, product
from pathlib import Path
from typing import Any

from bench_common import DTYPES, MODELS, add_device, matrix_weights, options, peak_flops, train, write_model, write_rows
from measure import EngineFailed, ask
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer

from megatron_brorl.families.shape import read_shape

PHASES = ("generate", "score", "train", "weight_sync", "step")
WORDS_PER_ANSWER = 32  # Half of the answers are right.
BYTES = 256
END = "<|endoftext|>"


def words(vocab: int) -> tuple[list[str], list[str]]:
    """Return the answers and plain words of a vocabulary of `vocab` tokens, which also has bytes and an end token."""
    answers = [f"<answer>{i % 2}</answer>{i}" for i in range(vocab // WORDS_PER_ANSWER)]
    return answers, [f"<w{i}>" for i in range(vocab - BYTES - 1 - len(answers))]


def write_tokenizer(vocab: int, directory: Path) -> None:
    """Write a tokenizer of one word per token, of Qwen2's class, which transformers expects for a Qwen2 model."""
    alphabet = {byte: i for i, byte in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer: Any = Qwen2Tokenizer(vocab=alphabet, merges=[], eos_token=END, pad_token=END, unk_token=None)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in chain(*words(vocab))])
    tokenizer.save_pretrained(directory)


def questions(vocab: int, tokens: int, count: int) -> list[dict[str, str]]:
    """Return `count` rows with different prompts of the given number of plain words."""
    draw = random.Random(tokens)
    _, plain = words(vocab)
    return [{"prompt": "".join(draw.choices(plain, k=tokens)), "answer": "1"} for _ in range(count)]


def make_job(args: argparse.Namespace, model: Path, prompt: int, dtype: str) -> dict[str, Any]:
    """Return the job of both sides. model: directory of write_model and write_tokenizer. prompt: tokens of a prompt."""
    micro_batch = min(args.trl_micro_batch, args.n)
    arguments = {  # options of GRPOConfig: a step generates its responses in one call, and takes one optimizer step
        "max_steps": 1 + args.repeat,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": args.groups * args.n // micro_batch,
        "num_generations": args.n,
        "max_completion_length": args.response,
        "epsilon_high": 0.28,
        "learning_rate": 1e-6,
    }
    return {
        "name": model.name,
        "model": str(model),
        "scratch": str(model.parent),
        "threads": args.threads,
        "device": args.device,
        "rows": questions(read_shape(model).vocab, prompt, args.groups * (1 + args.repeat)),
        "groups": args.groups,
        "n": args.n,
        "prompt": prompt,
        "dtype": dtype,
        "response": args.response,
        "micro_batch": args.trl_micro_batch,
        "tokens_per_micro_batch": args.tokens_per_micro_batch,
        "pattern": "<answer>(.*?)</answer>",
        "arguments": arguments,
    }


def settings(job: dict[str, Any], directory: Path) -> list[str]:
    """Write the rows and an empty configuration. Return the path of the configuration, and the overrides of the job."""
    data = directory / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in job["rows"]), encoding="utf-8")
    config = directory / "run.toml"
    config.touch()
    return [
        str(config),
        f"run.dir={directory / 'run'}",
        f"model.path={job['model']}",
        f"model.dtype={job['dtype']}",
        f'data.train=["{data}"]',
        f"rollout.n={job['n']}",
        f"rollout.dtype={job['dtype']}",
        f"rollout.prompts={job['groups']}",
        f"rollout.max_tokens={job['response']}",
        "reward.extract=answer_tag",
        "reward.cut_off_factor=1.0",  # a response that ends at the length limit counts
        f"train.steps={len(job['rows']) // job['groups']}",
        "train.checkpoint_every=0",
        f"train.tokens_per_micro_batch={job['tokens_per_micro_batch']}",
    ]


def ours(job: dict[str, Any], directory: Path, *overrides: str) -> dict[str, Any]:
    """Run `brorl train` on the rows of the job."""
    return train(directory / "run", [*settings(job, directory), *overrides], job["threads"])


def row(engine: str, report: dict[str, Any], job: dict[str, Any], prompt: int, weights: int) -> dict[str, Any]:
    """Return one row. fma_peak_share is in operations per second; `main` divides it by the peak."""
    if not all(0 < step["reward"] < 1 for step in report["steps"]):
        raise EngineFailed(f"{engine}: all rewards of a step are the same, so there was nothing to train on")
    timed = report["steps"][1:]
    seconds = {p: statistics.median(s[p] for s in timed) for p in PHASES if p in timed[0]}
    tokens = statistics.median(s["tokens"] for s in timed)
    return {
        "engine": engine,
        "model": job["name"],
        "groups": job["groups"],
        "prompt": prompt,
        "n": job["n"],
        "lengths": str(job["response"]),
        "micro_batch": f"{job['tokens_per_micro_batch']} tokens" if engine != "trl" else f"{job['micro_batch']} rows",
        "dtype": job["dtype"],
        "threads": job["threads"],
        "tokens": tokens,
        "seconds": seconds,
        "samples_per_s": job["groups"] * job["n"] / seconds["step"],
        "tokens_per_s": tokens / seconds["step"],
        "peak_mib": report["peak_mib"],
        "fma_peak_share": 8 * weights * tokens / seconds["step"],
        "others_cpu_share": report["others_cpu_share"],
        "version": report["version"],
    }


def show(rows: list[dict[str, Any]]) -> None:
    print(
        "prompt    N  dtype  engine   samples/s  brorl is peak MiB peak share others  generate   score   train    sync"
        "    step"
    )
    speeds = {(r["prompt"], r["dtype"]): r["samples_per_s"] for r in rows if r["engine"] == "brorl"}
    for r in rows:
        phases = "".join(f"{r['seconds'][p]:>8.3f}" if p in r["seconds"] else f"{'-':>8}" for p in PHASES[1:])
        print(
            f"{r['prompt']:>6}{r['n']:>5}  {r['dtype']:<7}{r['engine']:<7}{r['samples_per_s']:>11.1f}"
            f"{speeds[r['prompt'], r['dtype']] / r['samples_per_s']:>9.2f}x{r['peak_mib']:>8.0f}"
            f"{r['fma_peak_share']:>11.1%}{r['others_cpu_share']:>7.0%}{r['seconds']['generate']:>10.3f}{phases}"
        )


def main() -> None:
    parser = options(
        __doc__, quick="N = 64, a prompt of 64 tokens and responses of 16", repeat=2, repeats="timed steps per row"
    )
    parser.add_argument("--model", choices=MODELS, default="t4")
    parser.add_argument("--n", type=int, default=512, help="rollouts per prompt (%(default)s)")
    parser.add_argument("--groups", type=int, default=1, help="prompts per step (%(default)s)")
    parser.add_argument("--prompts", nargs="+", type=int, default=[64, 256], help="prompt tokens")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32"])
    parser.add_argument("--response", type=int, default=64, help="response tokens at most (%(default)s)")
    parser.add_argument("--lora", type=int, help="also run this project with adapters of this rank")
    parser.add_argument("--trl-python", help="interpreter of an environment with trl")
    parser.add_argument("--trl-micro-batch", type=int, default=64, help="its per_device_train_batch_size (%(default)s)")
    parser.add_argument(
        "--tokens-per-micro-batch",
        type=int,
        default=2048,
        help="train.tokens_per_micro_batch of brorl, which decides on its memory (%(default)s)",
    )
    add_device(parser)
    args = parser.parse_args()
    if args.quick:
        args.n = 64
        args.prompts = [64]
        args.response = 16
    if args.n % min(args.trl_micro_batch, args.n):
        parser.error(f"--trl-micro-batch {args.trl_micro_batch} does not divide --n {args.n}")

    peaks = {dtype: peak_flops(dtype, args.threads, args.device) for dtype in args.dtypes}
    rows = []
    for prompt, dtype in product(args.prompts, args.dtypes):
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch)
            model = directory / args.model
            write_model(args.model, model)
            shape = read_shape(model)
            write_tokenizer(shape.vocab, model)
            job = make_job(args, model, prompt, dtype)
            try:
                reports = {"brorl": ours(job, directory)}
                if args.lora:
                    (directory / "lora").mkdir()
                    reports["lora"] = ours(job, directory / "lora", f"lora.rank={args.lora}")
                if args.trl_python:
                    reports["trl"] = ask(args.trl_python, "trainer_trl.py", job, directory)
                rows += [row(engine, report, job, prompt, matrix_weights(shape)) for engine, report in reports.items()]
            except EngineFailed as e:
                sys.exit(f"bench_step: {e}")

    for dtype, peak in peaks.items():
        print(f"{dtype}: peak of multiply-adds {peak / 1e9:.0f} GFLOP/s on {args.threads} threads or the GPU")
        for r in rows:
            if r["dtype"] == dtype:
                r["fma_peak_share"] /= peak
    show(rows)
    write_rows(args.json, rows)


if __name__ == "__main__":
    main()
