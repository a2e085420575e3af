#!/usr/bin/env python3
"""Tokens per second and peak memory of N siblings of one prompt in the built-in engine and in others, in one run.

    python benchmarks/bench_rollout.py [--quick] [--json FILE] [--models t4 m30] [--dtypes fp32 bf16] [--n 1 8 64 512]
                                  [--prompts 64 512] [--lengths 64 8-256] [--engines brorl transformers]
                                  [--vllm-python PYTHON] [--llamacpp-python PYTHON] [--device cuda] [--threads N]
                                  [--repeat N]

A model is a Hugging Face directory, or one of MODELS in bench_common with random weights. Every engine runs in a
separate process, with the same weights, prompts and threads, at temperature 1 without top-p or top-k, and every sibling
gets the same forced length in all of them: 64 for all, or 8-256 for lengths evenly spread from 8 to 256 in a shuffled
order. No engine looks for an end token. The first call warms up; tokens_per_s is the median of the others, each with a
different prompt. The time includes that of the prompt. Only brorl computes log-probabilities as well.

peak_mib: peak resident set of the engine's process, runtime and weights included; on a GPU, peak of torch's tensors.
fma_peak_share: two operations for each weight of the layers' matrices and the LM head per generated token (nothing for
the prompt, attention or sampling), against the machine's peak in the same dtype (bench_common.peak_flops).
others_cpu_share: the share of the machine that other processes used during the run; above a few percent, measure again.
brorl also reports weight_sync_ms, a whole update_weights, and prompt_kv_copies: the growth of the keys and values alive
in the second decoding step when the prompt is twice as long, over the size of one copy of the prompt's keys and values
(exact for prompts of a multiple of 16 tokens, the size of a page). Linux only.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench_common import DTYPES, MODELS, add_device, matrix_weights, options, peak_flops, write_model, write_rows
from measure import EngineFailed, ask

from megatron_brorl.families.shape import ModelShape, read_shape

ENGINES = ("brorl", "transformers")


def sibling_lengths(spec: str, n: int) -> list[int]:
    """Return the number of new tokens of each sibling: "64" for all, or "8-256" evenly spread in a shuffled order."""
    low, _, high = spec.partition("-")
    first = int(low)
    last = int(high or low)
    lengths = [first + round(i * (last - first) / max(n - 1, 1)) for i in range(n)]
    random.Random(0).shuffle(lengths)
    return lengths


def prompts(vocab: int, tokens: int, calls: int) -> list[list[int]]:
    """Return one random prompt per call; prompts differ from the first token on."""
    draw = random.Random(tokens)
    return [[(draw.randrange(vocab) if i else 2 + call) for i in range(tokens)] for call in range(calls)]


def kv_bytes(shape: ModelShape, dtype: str, tokens: int) -> int:
    """Return the bytes of the keys and values of one sequence."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * tokens * DTYPES[dtype].itemsize


def measure(
    pythons: dict[str, str], shape: ModelShape, model: str, job: dict[str, Any], columns: dict[str, Any], scratch: Path
) -> list[dict[str, Any]]:
    """Return a row of each engine for one job. fma_peak_share is in operations/s; `main` divides it by the peak.

    pythons: interpreter of each engine. columns: the columns of all rows that describe the job."""
    rows = []
    tokens = sum(job["lengths"])
    for engine, python in pythons.items():
        report = ask(python, f"engine_{engine}.py", job, scratch)
        seconds = statistics.median(report["seconds"])
        row = {
            "engine": engine,
            "model": model,
            **columns,
            "tokens": tokens,
            "threads": job["threads"],
            "seconds": seconds,
            "tokens_per_s": tokens / seconds,
            "peak_mib": report["peak_mib"],
            "fma_peak_share": 2 * matrix_weights(shape) * tokens / seconds,
            "others_cpu_share": report["others_cpu_share"],
            "version": report.get("version"),
        }
        if "weight_sync_ms" in report:
            row["weight_sync_ms"] = report["weight_sync_ms"]
        if "prompt_kv_bytes" in report:
            row["prompt_kv_bytes"] = report["prompt_kv_bytes"]
            row["prompt_kv_copies"] = report["prompt_kv_bytes"] / kv_bytes(shape, job["dtype"], columns["prompt"])
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the rows of one table with their ratios."""
    ours = next((r["tokens_per_s"] for r in rows if r["engine"] == "brorl"), None)
    for r in rows:
        ratio = f"{ours / r['tokens_per_s']:.2f}x" if ours else "-"
        forms = {"weight_sync_ms": "weight sync {:.1f} ms", "prompt_kv_copies": "prompt KV {:.2f}x"}
        extra = "  " + ", ".join(form.format(r[key]) for key, form in forms.items() if key in r)
        print(
            f"{r['model']:<14}{r['dtype']:<6}{r['prompt']:>6}{r['n']:>5}{r['lengths']:>8}  {r['engine']:<13}"
            f"{r['tokens_per_s']:>9.0f}{ratio:>9}{r['peak_mib']:>9.0f}{r['fma_peak_share']:>10.1%}"
            f"{r['others_cpu_share']:>8.0%}{extra}",
            flush=True,
        )


def main() -> None:
    parser = options(
        __doc__, quick="t4, N = 64, a prompt of 64 and 16 tokens each", repeat=3, repeats="timed calls per row"
    )
    parser.add_argument("--models", nargs="+", default=["t4", "m30"], help=f"directories, or {', '.join(MODELS)}")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32"])
    parser.add_argument("--n", nargs="+", type=int, default=[512], help="siblings")
    parser.add_argument("--prompts", nargs="+", type=int, default=[64, 512], help="prompt tokens")
    parser.add_argument("--lengths", nargs="+", default=["64"], help="response tokens, such as 64 or 8-256")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--vllm-python", help="interpreter of an environment with vLLM")
    parser.add_argument("--llamacpp-python", help="interpreter of an environment with xllamacpp, gguf and safetensors")
    add_device(parser)
    args = parser.parse_args()
    if args.quick:
        args.models = ["t4"]
        args.n = [64]
        args.prompts = [64]
        args.lengths = ["16"]
    pythons = dict.fromkeys(args.engines, sys.executable)
    if args.vllm_python:
        pythons["vllm"] = args.vllm_python
    if args.llamacpp_python:
        pythons["llamacpp"] = args.llamacpp_python
    cases = list(itertools.product(args.dtypes, args.prompts, args.n, args.lengths))
    peaks = {dtype: peak_flops(dtype, args.threads, args.device) for dtype in args.dtypes}
    rows = []
    for model in args.models:
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(model)
            if model in MODELS:
                directory = Path(scratch) / model
                write_model(model, directory)
            shape = read_shape(directory)
            for dtype, prompt_tokens, n, spec in cases:
                lengths = sibling_lengths(spec, n)
                job = {
                    "model": str(directory),
                    "scratch": scratch,
                    "dtype": dtype,
                    "device": args.device,
                    "threads": args.threads,
                    "prompts": prompts(shape.vocab, prompt_tokens, calls=1 + args.repeat),
                    "lengths": lengths,
                    # Enough for the prompt in every sibling, so that no engine has to preempt.
                    "kv_gib": kv_bytes(shape, dtype, n * (prompt_tokens + max(lengths))) // 2**30 + 1,
                }
                columns = {"prompt": prompt_tokens, "n": n, "lengths": spec, "dtype": dtype}
                try:
                    rows += measure(pythons, shape, directory.name, job, columns, Path(scratch))
                except EngineFailed as e:
                    sys.exit(f"bench_rollout: {e}")
    for dtype, peak in peaks.items():
        print(f"{dtype}: peak of multiply-adds {peak / 1e9:.0f} GFLOP/s on {args.threads} threads or the GPU")
        for row in rows:
            if row["dtype"] == dtype:
                row["fma_peak_share"] /= peak
    print("model         dtype prompt    N  tokens  engine         tokens/s  brorl is peak MiB peak share  others")
    for _, table in itertools.groupby(rows, lambda r: (r["model"], r["dtype"], r["prompt"], r["n"], r["lengths"])):
        show(list(table))
    write_rows(args.json, rows)


if __name__ == "__main__":
    main()
