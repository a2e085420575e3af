"""vLLM as training has it, behind this project's process, messages and weights, for benchmarks/bench_rollout.py."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from measure import REFITS, answer, family_peak_mib, read_job, time_rollouts
from safetensors.torch import load_file
from vllm_job import engine_options

from megatron_brorl.config.schema import EngineConfig
from megatron_brorl.model_shape import WEIGHTS, read_shape
from megatron_brorl.models.hf_names import hf_shapes
from megatron_brorl.ops.checksum import seal
from megatron_brorl.rollout.engine import Request, Sampling
from megatron_brorl.rollout.remote.engine import RemoteEngine
from megatron_brorl.rollout.remote.process import make_folder
from megatron_brorl.types import Prompt


def main() -> None:
    job = read_job()
    torch.set_num_threads(1)  # the engine computes, this waits
    options, section = engine_options(job), EngineConfig(**job["section"])
    folder, names = make_folder("/dev/shm", "engine.shared_memory"), hf_shapes(read_shape(Path(job["model"])))
    begun = time.perf_counter()
    engine = RemoteEngine(section, options, names, folder, [0], Path(job["scratch"]) / "engine.log")
    start_s = time.perf_counter() - begun

    # What it takes to begin, and to give it new weights.
    weights = list(load_file(f"{job['model']}/{WEIGHTS}").items())
    refits = []
    for version in range(REFITS):
        begun = time.perf_counter()
        engine.update_weights(seal(weights), version)
        refits.append(time.perf_counter() - begun)

    def generate(prompt: list[int], lengths: list[int], seed: int) -> Sequence[Sequence[int]]:
        request = Request(Prompt(str(seed), "", tuple(prompt), None, "exact"), seed, len(lengths))
        (group,) = engine.generate([request], Sampling(1.0, 1.0, 0, lengths[0], ()))
        return [r.token_ids.tolist() for r in group]

    found = {**time_rollouts(job, generate), "peak_mib": family_peak_mib()}
    name = engine.capabilities.engine
    engine.close()
    answer(**found, start_s=start_s, refit_ms=1000 * statistics.median(refits), version=name)


if __name__ == "__main__":
    main()
