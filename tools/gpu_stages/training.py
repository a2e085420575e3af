"""One optimizer step over the siblings of one prompt, as the stages `step` and `fp8` take it, in a fresh process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from bench_common import DTYPES
from bench_sharing import siblings

from gpu_stages.common import Job, model, wait
from gpu_stages.roofline import device_name, mfu
from megatron_brorl.config.schema import AlgoConfig, Fp8Config, OptimConfig, ParallelConfig
from megatron_brorl.model_shape import read_shape
from megatron_brorl.models import fp8
from megatron_brorl.ops.backend import backend
from megatron_brorl.parallel import device, grid
from megatron_brorl.parallel.flops import TRAINING, forward_flops
from megatron_brorl.train.update import update_policy
from megatron_brorl.train.worker import StageOptions, Worker
from megatron_brorl.types import Experience

SIZES = {"cuda": (512, 512, 256), "cpu": (32, 8, 8)}  # prompt tokens, siblings, response tokens
MICRO_BATCH = {"cuda": 32768, "cpu": 512}  # tokens
UPDATES = {"cuda": 3, "cpu": 2}  # of which the first warms up


@dataclass(frozen=True)
class Case:
    """What a step is taken with."""

    share_prompt: bool
    offload: bool = False
    fp8: Mapping[str, Any] = field(default_factory=dict)  # fields of config.schema.Fp8Config
    model: str = ""  # directory; "" = that of the stages


def make_worker(job: Job, case: Case) -> Worker:
    """A worker with the model's weights. Raises UserError where this machine cannot train so."""
    directory = Path(case.model) if case.model else model(job)
    shape, config = read_shape(directory), Fp8Config(**case.fp8)
    fp8.check(config, shape, 1)
    options = StageOptions(
        MICRO_BATCH[job.device],
        backend("fused", device.default_device()),
        DTYPES[job.dtype],
        share_prompt=case.share_prompt,
        recompute=not job.dry,  # as the 1.5B example has it
        offload=case.offload,
        fields=fp8.settings(config),
    )
    worker = Worker(shape, _grid(), options, OptimConfig())
    worker.load_hf(directory)
    return worker


@lru_cache(maxsize=1)
def _grid() -> grid.Grid:
    """Of this process alone."""
    return grid.build(ParallelConfig())


def make_experience(job: Job, worker: Worker) -> Experience:
    """The siblings that every case trains on, drawn alike."""
    return siblings(worker.shape.vocab, *SIZES[job.device])


def take(worker: Worker, experience: Experience, update: int) -> dict[str, float]:
    """One optimizer step over all rows; its figures."""
    rows = list(range(len(experience.responses)))
    return update_policy(worker, experience, [rows], AlgoConfig(), OptimConfig(), 1.0, update)


def measured(args: tuple[Job, Case]) -> dict[str, Any]:
    """Loss and gradient norm of the first step, and time and memory of the others; to be called in a fresh process."""
    job, case = args
    worker = make_worker(job, case)
    experience = make_experience(job, worker)
    found, taken = [], []
    for update in range(UPDATES[job.device]):
        worker.offload()  # as before every step of a run; moves weights and optimizer where the case says so
        left = torch.cuda.memory_allocated() / 2**20 if device.on_gpu() else None
        if device.on_gpu() and update == 1:
            torch.cuda.reset_peak_memory_stats()
        wait(job.device)
        begun = time.perf_counter()
        found.append(take(worker, experience, update))
        wait(job.device)
        taken.append(time.perf_counter() - begun)

    # Operations count what is computed once: neither recomputation nor second copies of a shared prompt.
    seconds, rows = statistics.median(taken[1:]), (experience.prompts, experience.responses)
    flops = TRAINING * forward_flops(worker.shape, worker.micro_batches(*rows), worker.shape.vocab)
    share = mfu(flops, seconds, device_name(job.device))
    figures: dict[str, Any] = {
        "loss": found[0]["loss"],
        "grad norm": found[0]["grad_norm"],
        "skipped": sum(f["updates_skipped"] for f in found),
        "seconds": seconds,
        "tokens/s": worker.tokens(*rows)["computed"] / seconds,
    }
    figures |= {} if share is None else {"MFU": share}
    if left is not None:
        figures |= {"peak MiB": torch.cuda.max_memory_allocated() / 2**20, "MiB while the engine generates": left}
    grid.leave()
    return figures
