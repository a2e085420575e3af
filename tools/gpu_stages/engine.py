"""(c) The built-in engine: N siblings of one prompt against transformers' generate, and against the memory's speed."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_common import DTYPES, alone
from measure import ask

from gpu_stages.common import Job, Row, attempt, failed, judged, model, ok, prompt_ids
from gpu_stages.roofline import decode_share, device_name
from megatron_brorl.checkpoints.hugging_face import Checkpoint
from megatron_brorl.model_shape import read_shape
from megatron_brorl.models.hf_names import hf_shapes
from megatron_brorl.ops.backend import backend
from megatron_brorl.rollout.engine import Request, Sampling
from megatron_brorl.rollout.native.engine import TorchEngine
from megatron_brorl.types import Prompt, Rollout

SIZES = {"cuda": (512, 512, 256), "cpu": (8, 16, 8)}  # prompt tokens, siblings, response tokens
CALLS = {"cuda": 2, "cpu": 1}  # timed ones, after one that warms up
COMPARED = (4, 32)  # siblings and tokens of the comparison with transformers ...
SHORT = 24  # ... and of its prompt
GAP = {"bf16": 0.05, "fp32": 1e-4}  # nats, of log-probabilities: the mean of |difference|


def run(job: Job) -> Iterator[Row]:
    """The rows of this stage."""
    what = "log-probabilities against transformers"
    yield attempt(what, lambda: alone(agreement, what, job))
    found: dict[str, float] = {}
    for engine in ("brorl", "transformers"):
        yield attempt(f"rollouts, {engine}", partial(_rollouts, engine, found, job))
    if len(found) == 2:
        yield ok("rollouts, brorl over transformers", ratio=found["brorl"] / found["transformers"])


def transformers_gap(directory: Path, prompt: list[int], rollouts: list[Rollout], job: Job) -> dict[str, float]:
    """Mean and largest |difference| of the rollouts' log-probabilities from those of transformers' model, in nats."""
    from transformers import AutoModelForCausalLM

    dtype = DTYPES[job.dtype]
    reference: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval().to(job.device)
    gaps = []
    with torch.inference_mode():
        for rollout in rollouts:
            ids = torch.tensor([prompt + rollout.token_ids.tolist()], device=job.device)
            logits = reference(ids).logits[0, len(prompt) - 1 : -1].float().cpu()
            expected = logits.log_softmax(-1).gather(-1, rollout.token_ids[:, None])[:, 0]
            gaps.append((rollout.log_probs - expected).abs())
    apart = torch.cat(gaps)
    return {"mean gap nats": float(apart.mean()), "largest gap nats": float(apart.max()), "tokens": len(apart)}


def agreement(args: tuple[str, Job]) -> Row:
    """The engine's log-probabilities of what it sampled; to be called in a fresh process."""
    what, job = args
    directory, device = model(job), torch.device(job.device)
    shape, checkpoint = read_shape(directory), Checkpoint(directory)
    names, ops = hf_shapes(shape), backend("fused", device)
    n, tokens = COMPARED
    engine = TorchEngine(shape, names, device, DTYPES[job.dtype], n, ops.sample_tokens, ops.decode)
    engine.update_weights(((name, checkpoint.tensor(name)) for name in names), 0)

    # No token ends a response.
    (prompt,) = prompt_ids(shape.vocab, SHORT, 1)
    request = Request(Prompt("0", "", tuple(prompt), None, "exact"), 7, n)
    (rollouts,) = engine.generate([request], Sampling(1.0, 1.0, 0, tokens, ()))
    engine.sleep()
    gap = transformers_gap(directory, prompt, rollouts, job)
    return judged(what, "" if gap["mean gap nats"] <= GAP[job.dtype] else "they are apart", **gap)


def _rollouts(engine: str, found: dict[str, float], job: Job) -> Row:
    """benchmarks/engine_*.py on the device: tokens per second, and the share of what the memory's speed allows."""
    directory, (prompt, n, tokens) = model(job), SIZES[job.device]
    shape = read_shape(directory)
    asked = {
        "model": str(directory),
        "scratch": job.scratch,
        "device": job.device,
        "dtype": job.dtype,
        "threads": torch.get_num_threads(),
        "prompts": prompt_ids(shape.vocab, prompt, 1 + CALLS[job.device]),
        "lengths": [tokens] * n,
    }
    answer = ask(sys.executable, f"engine_{engine}.py", asked, Path(job.scratch))
    taken = statistics.median(answer["seconds"])
    found[engine] = n * tokens / taken

    # The time has the prompt in it, the bound has not.
    share = decode_share(shape, DTYPES[job.dtype].itemsize, (prompt, n, tokens), taken, device_name(job.device))
    if share is not None and share > 1:
        return failed(f"rollouts, {engine}", f"{share:.2f} of the bound: the bound or the clock is wrong")
    figures = {
        "prompt": prompt,
        "N": n,
        "tokens": tokens,
        "dtype": job.dtype,
        "tokens/s": found[engine],
        "seconds": taken,
    }
    figures |= {} if share is None else {"of memory roofline": share}
    figures |= {key: answer[key] for key in ("refit_ms", "device_peak_mib", "version") if key in answer}
    return ok(f"rollouts, {engine}", **figures)
