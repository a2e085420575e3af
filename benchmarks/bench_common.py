"""Shared parts of the benchmarks: options, fresh processes, the machine's peak, random models, rows."""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from measure import EngineFailed, run

from megatron_brorl.families.shape import ModelShape
from megatron_brorl.models.weights.names import hf_shapes
from megatron_brorl.parallel import flops

sys.path.append(str(Path(__file__).parents[1] / "tools"))
from random_model import qwen2_config, write_random_model

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MODELS = {
    "t4": qwen2_config(hidden=256, layers=4, heads=4, kv_heads=2, ffn=688, vocab=4096, context=2048),
    "m30": qwen2_config(hidden=512, layers=8, heads=8, kv_heads=2, ffn=1536, vocab=8192, context=2048),
    # A mixture of experts, and a dense model with equally many weights per token.
    "moe": qwen2_config(hidden=256, layers=4, heads=4, kv_heads=2, ffn=256, vocab=1024, context=2048)
    | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 64, "norm_topk_prob": True}
    | {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256},
    "moe_dense": qwen2_config(hidden=256, layers=4, heads=4, kv_heads=2, ffn=1024, vocab=1024, context=2048),
    # The sizes of SmolLM2-135M.
    "135m": qwen2_config(hidden=576, layers=30, heads=9, kv_heads=3, ffn=1536, vocab=49152, context=8192),
    # The sizes of Qwen2.5-1.5B.
    "1.5b": qwen2_config(hidden=1536, layers=28, heads=12, kv_heads=2, ffn=8960, vocab=151936, context=32768),
}


# `brorl` with the peak of its device memory in MiB as the last line of its output
_WITH_PEAK = """
import atexit, runpy, torch
atexit.register(lambda: print(torch.cuda.max_memory_allocated() / 2**20))
runpy.run_module("megatron_brorl", run_name="__main__")
"""


def options(doc: str | None, quick: str, repeat: int, repeats: str) -> argparse.ArgumentParser:
    """Return a parser with the common options. quick, repeats: the help of --quick and --repeat."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, help="write the rows here as a JSON list")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeat", type=int, default=repeat, help=repeats)
    return parser


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add --device. "cpu" hides GPUs from this process and its children."""

    def device(name: str) -> str:
        if name == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return name

    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=device, choices=("cuda", "cpu"), default=default, help="cuda if there is one")


def write_rows(path: Path | None, rows: Sequence[dict[str, Any]]) -> None:
    """Write the rows as a JSON list if there is a path (--json)."""
    if path:
        path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def alone(function: Callable[..., Any], *args: Any) -> Any:
    """Return function(args) from a fresh process, so that no row inherits memory or warm caches from another."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, args).result()


def peak_flops(dtype: str, threads: int, device: str = "cpu") -> float:
    """Return the peak operations per second: multiply-adds of `threads` cores (fma_peak.c), or the GPU's in bf16.

    bf16 on a CPU needs AVX-512 BF16, and the faster tiles (AMX) are not counted: shares can exceed 1. A GPU without an
    entry in parallel.flops has no peak: nan."""
    if device == "cuda":
        return flops.peak_flops() or math.nan
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory) / "fma_peak"
        source = Path(__file__).parent / "fma_peak.c"
        flags = ["-DBF16"] if dtype == "bf16" else []
        subprocess.run(["gcc", "-O3", "-march=native", *flags, source, "-o", program], check=True)
        copies = [subprocess.Popen(program, stdout=subprocess.PIPE, text=True) for _ in range(threads)]
        return sum(float(copy.communicate()[0]) for copy in copies)


def brorl(arguments: Sequence[str], threads: int) -> tuple[float, str]:
    """Run a command of this project as a user does. Return the share of the machine that others used, and the output.

    On a GPU, the last line of the output is the peak of the device memory in MiB. Raises EngineFailed with the last
    lines of stderr."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "TRANSFORMERS_VERBOSITY": "error"}
    program = ["-c", _WITH_PEAK] if torch.cuda.is_available() else ["-m", "megatron_brorl"]
    process, others = run([sys.executable, *program, *arguments], environment)
    if process.returncode:
        raise EngineFailed(f"brorl {arguments[0]} failed:\n" + "\n".join(process.stderr.strip().splitlines()[-15:]))
    return others, process.stdout


def train(directory: Path, arguments: Sequence[str], threads: int) -> dict[str, Any]:
    """Run `brorl train` with the run.dir `directory`. Return steps, model and costs with the keys of trainer_trl.py."""
    others, output = brorl(["train", *arguments], threads)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if "trained_tokens" in line]  # others are evaluations
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    return {
        "steps": [line | line["time"] | {"tokens": line["trained_tokens"]} for line in lines],
        "model": str(directory / "model"),
        "peak_mib": float(output.splitlines()[-1]) if torch.cuda.is_available() else summary["peak_rss_mib"],
        "job_seconds": summary["job_seconds"],
        "others_cpu_share": others,
        "version": None,
    }


def write_model(name: str, directory: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write MODELS[name] with random weights as a Hugging Face directory."""
    write_random_model(MODELS[name], directory, seed=0, dtype=dtype)


def matrix_weights(shape: ModelShape) -> int:
    """Count the weights that multiply every token: the matrices of the layers and the LM head."""
    layers = sum(s[0] * s[1] for name, s in hf_shapes(shape).items() if ".layers." in name and len(s) == 2)
    return layers + shape.vocab * shape.hidden
