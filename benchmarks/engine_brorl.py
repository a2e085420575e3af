"""This project's rollout engine for benchmarks/bench_rollout.py, on the job's device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from measure import SYNCS, answer, read_job, time_rollouts
from safetensors.torch import load_file
from torch import Tensor

from megatron_brorl.families.shape import WEIGHTS, read_shape
from megatron_brorl.models.weights.names import hf_shapes
from megatron_brorl.ops.backend import backend
from megatron_brorl.ops.fused.decode import sample_tokens
from megatron_brorl.rollout.engine import Request, Sampling
from megatron_brorl.rollout.native.pages import page_bytes
from megatron_brorl.rollout.native.torch_engine import TorchEngine
from megatron_brorl.types import Prompt

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STOP = 1  # the token that ends a sibling at its length


class Sampler:
    """Wraps sample_tokens: sibling i ends at its length with the stop token."""

    def __init__(self, siblings: int, device: torch.device) -> None:
        # Later calls write to this tensor in place, because the engine may have captured it in a CUDA graph.
        self.lengths = torch.zeros(siblings, dtype=torch.int64, device=device)
        self.probe: Callable[[], int] | None = None  # called at every draw
        self.probed = 0  # the last result of `probe`

    def __call__(
        self,
        logits: Tensor,
        keys: Tensor,
        index: Tensor,
        position: Tensor,
        temperature: float,
        top_p: float,
        top_k: int,
    ) -> tuple[Tensor, Tensor]:
        if self.probe:
            self.probed = self.probe()
        ids, log_probs = sample_tokens(logits, keys, index, position, temperature, top_p, top_k)
        ids = torch.where(ids == STOP, STOP + 1, ids)
        return torch.where(position + 1 == self.lengths[index], STOP, ids), log_probs


def main() -> None:
    job = read_job()
    torch.set_num_threads(job["threads"])
    shape = read_shape(job["model"])
    dtype = DTYPES[job["dtype"]]
    device = torch.device(job["device"])
    sampler = Sampler(len(job["lengths"]), device)
    ops = backend("fused", device).decode
    engine = TorchEngine(shape, hf_shapes(shape), device, dtype, len(job["lengths"]), sample=sampler, ops=ops)
    weights = {name: tensor.to(dtype) for name, tensor in load_file(f"{job['model']}/{WEIGHTS}").items()}
    engine.update_weights(weights.items(), version=0)

    def generate(prompt: list[int], lengths: list[int], seed: int) -> Sequence[Sequence[int]]:
        sampler.lengths.copy_(torch.tensor(lengths))
        sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=max(lengths), stop_ids=(STOP,))
        request_prompt = Prompt(id=str(seed), text="", token_ids=tuple(prompt), answer=None, verifier="exact")
        (group,) = engine.generate([Request(request_prompt, key=seed, n=len(lengths))], sampling)
        return [r.token_ids.tolist() for r in group]

    timings: dict[str, Any] = time_rollouts(job, generate)
    syncs = []
    for version in range(1, 1 + SYNCS):
        start = time.perf_counter()
        engine.update_weights(weights.items(), version)
        syncs.append(time.perf_counter() - start)

    # The memory of one prompt is the difference between a request with it twice and once, at the second of two draws.
    def kv_bytes() -> int:
        pool = engine._pool
        assert pool
        return (pool.size - pool.free) * page_bytes(shape, dtype, pool.page, pool.contiguous)

    prompt = job["prompts"][0]
    kv_sizes = []
    sampler.probe = kv_bytes
    for times in (1, 2):
        generate(prompt * times, [2] * len(job["lengths"]), seed=0)
        kv_sizes.append(sampler.probed)
    answer(**timings, weight_sync_ms=1000 * statistics.median(syncs), prompt_kv_bytes=kv_sizes[1] - kv_sizes[0])


if __name__ == "__main__":
    main()
