"""What the stages share: what a stage is told, the form of a row, clocks, the model."""

from __future__ import annotations

import dataclasses
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bench_common import MODELS
from bench_rollout import prompts
from random_model import qwen2_config, write_random_model

ROOT = Path(__file__).parents[2]
Row = dict[str, Any]  # "what", "result" ("ok", "failed: ...", "missing: ...", "left out: ...") and figures

# Qwen2.5-1.5B, by its published config.json, with tied embeddings as there.
LARGE = qwen2_config(hidden=1536, layers=28, heads=12, kv_heads=2, ffn=8960, vocab=151936, context=32768)
SMALL = MODELS["t4"]


@dataclass(frozen=True)
class Job:
    """What a stage is started with; JSON on the way to its process."""

    device: str  # "cuda", or "cpu": the dry mode, with tiny sizes
    scratch: str  # folder for models and logs, the same for all stages
    pythons: dict[str, str] = field(default_factory=dict)  # interpreters of engines, by rollout.engine

    @property
    def dry(self) -> bool:
        """Whether there is no GPU, so that sizes are tiny."""
        return self.device == "cpu"

    @property
    def dtype(self) -> str:
        """Of weights and activations, by its name in bench_common.DTYPES."""
        return "fp32" if self.dry else "bf16"

    def as_json(self) -> dict[str, Any]:
        """The fields."""
        return dataclasses.asdict(self)


def ok(what: str, **figures: Any) -> Row:
    """A row of something that was run, and is what it should be where it was compared."""
    return {"what": what, "result": "ok", **figures}


def failed(what: str, why: str, **figures: Any) -> Row:
    """A row of something that went wrong."""
    return {"what": what, "result": f"failed: {' '.join(why.split())[:300]}", **figures}


def missing(what: str, why: str) -> Row:
    """A row of something that this machine does not have."""
    return {"what": what, "result": f"missing: {why}"}


def left_out(what: str, why: str) -> Row:
    """A row of something that is not asked of this machine."""
    return {"what": what, "result": f"left out: {why}"}


def judged(what: str, wrong: str, **figures: Any) -> Row:
    """ok where `wrong` is empty, else failed with it; the figures stand there in any case."""
    return failed(what, wrong, **figures) if wrong else ok(what, **figures)


def attempt(what: str, call: Callable[[], Row]) -> Row:
    """The row that `call` makes, or one that says what it raised: the next one is not stopped by it."""
    try:
        return call()
    except Exception as e:
        return failed(what, f"{type(e).__name__}: {e}")


def apart(a: float, b: float) -> float:
    """|a - b| over the larger of both; 0 where both are 0."""
    return abs(a - b) / (max(abs(a), abs(b)) or 1.0)


def wait(device: str) -> None:
    """Until the device has done what it was asked."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(call: Callable[[], Any], device: str, repeat: int = 5, warm: int = 2) -> float:
    """Median seconds of a call: between CUDA events on a GPU, by the clock on a CPU."""
    for _ in range(warm):
        call()
    return statistics.median(_once(call, device) for _ in range(repeat))


def _once(call: Callable[[], Any], device: str) -> float:
    if device == "cpu":
        begun = time.perf_counter()
        call()
        return time.perf_counter() - begun
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1000  # milliseconds


def peak_mib(call: Callable[[], Any], device: str) -> float | None:
    """MiB that a call takes at its peak beyond what was allocated before; None on a CPU."""
    if device == "cpu":
        call()
        return None
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def model(job: Job) -> Path:
    """A Hugging Face directory with random weights: the 1.5B shape on a GPU, four small layers in the dry mode.

    Written once for all stages, under another name until it is whole. It has no tokenizer.
    """
    directory = Path(job.scratch, "small" if job.dry else "large")
    if not directory.exists():
        aside = directory.with_suffix(f".{os.getpid()}")
        dtype = torch.float32 if job.dry else torch.bfloat16
        write_random_model(SMALL if job.dry else LARGE, aside, seed=0, dtype=dtype)
        aside.rename(directory)
    return directory


def prompt_ids(vocab: int, tokens: int, count: int) -> list[list[int]]:
    """`count` random prompts of so many tokens, different from their first one on."""
    return prompts(vocab, tokens, count)


def has(package: str, python: str = sys.executable) -> bool:
    """Whether an interpreter finds a package."""
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:
        return not subprocess.run([python, "-c", look], capture_output=True, timeout=60).returncode
    except (OSError, subprocess.TimeoutExpired):
        return False


def rows_of(attempts: list[tuple[str, Callable[[], Row]]]) -> Iterator[Row]:
    """A row of each, one after the other."""
    for what, call in attempts:
        yield attempt(what, call)
