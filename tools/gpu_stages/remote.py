"""(g) Engines in processes of their own, those of rollout.registry: refit, log-probabilities, sleep and wake, speed."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_common import DTYPES

from gpu_stages.common import Job, Row, attempt, has, judged, missing, model, ok, prompt_ids
from gpu_stages.engine import COMPARED, GAP, SHORT, SIZES, transformers_gap
from gpu_stages.roofline import decode_share, device_name
from megatron_brorl.checkpoints.hugging_face import Checkpoint
from megatron_brorl.config.schema import EngineConfig
from megatron_brorl.model_shape import ModelShape, read_shape
from megatron_brorl.models.hf_names import hf_shapes
from megatron_brorl.ops.checksum import seal
from megatron_brorl.rollout.engine import Request, Sampling
from megatron_brorl.rollout.registry import ENGINES
from megatron_brorl.rollout.remote.engine import RemoteEngine
from megatron_brorl.rollout.remote.process import make_folder
from megatron_brorl.rollout.remote.protocol import EngineOptions
from megatron_brorl.types import Prompt, Rollout

START_S = 300.0  # for an engine to come up, that its failure be a row before the stage's time is over
FULL = 0.95  # of the tokens asked for: engines need a stop token, and some siblings draw it
MEMORY = 0.5  # of the GPU, for the engine: transformers' model is beside it


def run(job: Job) -> Iterator[Row]:
    """The rows of this stage."""
    for key, kind in ENGINES.items():
        python = job.pythons.get(key) or sys.executable
        if not has(kind.package, python):
            yield missing(kind.name, f"{python} has no {kind.package}; --{key}-python names another interpreter")
            continue
        engine = _Engine(key, python, job)
        try:
            started = attempt(f"{kind.name}: start", engine.start)
            yield started
            if started["result"] == "ok":
                for name, call in engine.checks():
                    yield attempt(f"{kind.name}: {name}", partial(call, f"{kind.name}: {name}"))
        finally:
            engine.close()


class _Engine:
    """One of them with the stages' model."""

    def __init__(self, key: str, python: str, job: Job) -> None:
        self.key, self.python, self.job = key, python, job
        self.engine: RemoteEngine | None = None
        self.versions = 0

    def checks(self) -> list[tuple[str, Any]]:
        """In their order: each leaves the engine with weights and awake."""
        return [
            ("refit", self.refit),
            ("log-probabilities against transformers", self.agreement),
            ("sleep and wake", self.sleep),
            ("rollouts", self.rollouts),
        ]

    def start(self) -> Row:
        """Start the process; what it says of itself."""
        job, directory = self.job, model(self.job)
        shape, (prompt, n, tokens) = read_shape(directory), SIZES[job.device]
        section = EngineConfig(
            python=self.python, start_timeout_s=START_S, memory_fraction=MEMORY, cuda_graphs=not job.dry
        )
        options = EngineOptions(
            engine=self.key,
            model=str(directory),
            vocab=shape.vocab,
            context=max(prompt + tokens, SHORT + COMPARED[1]),
            dtype=str(DTYPES[job.dtype]).removeprefix("torch."),
            max_rows=n,
            stop_ids=(shape.vocab - 1,),
            section=asdict(section),
            kv_bytes=1 << 30 if job.dry else 0,
        )
        folder = make_folder(section.shared_memory)
        begun, log = time.perf_counter(), Path(job.scratch, f"{self.key}.log")
        self.engine = RemoteEngine(section, options, hf_shapes(shape), folder, [0], log)
        taken, c = time.perf_counter() - begun, self.engine.capabilities
        way = "CUDA IPC" if self.engine.ipc else "host memory"
        return ok(f"{ENGINES[self.key].name}: start", engine=c.engine, torch=c.torch, seconds=taken, weights=way)

    @property
    def shape(self) -> ModelShape:
        """Of the model."""
        return read_shape(model(self.job))

    def refit(self, what: str) -> Row:
        """The whole model, twice; the seconds of the second, for the first makes caches."""
        directory = model(self.job)
        checkpoint, taken, size = Checkpoint(directory), 0.0, 0
        for _ in range(2):
            named = [(name, checkpoint.tensor(name).to(self.job.device)) for name in hf_shapes(self.shape)]
            size = sum(x.nbytes for _, x in named)
            begun = time.perf_counter()
            self._update(named)
            taken = time.perf_counter() - begun
        return ok(what, MiB=size / 2**20, seconds=taken, **{"GB/s": size / taken / 1e9})

    def agreement(self, what: str) -> Row:
        """Of what it sampled, against transformers' model."""
        n, tokens = COMPARED
        (prompt,) = prompt_ids(self.shape.vocab, SHORT, 1)
        gap = transformers_gap(model(self.job), prompt, self._generate(prompt, n, tokens), self.job)
        return judged(what, "" if gap["mean gap nats"] <= GAP[self.job.dtype] else "they are apart", **gap)

    def sleep(self, what: str) -> Row:
        """What the device has free with the engine awake and asleep, and that it draws the same tokens afterwards."""
        assert self.engine
        (prompt,) = prompt_ids(self.shape.vocab, SHORT, 1)
        before = self._generate(prompt, 4, 8)
        awake = self._free_mib()
        self.engine.sleep()
        asleep = self._free_mib()
        begun = time.perf_counter()
        self.engine.wake()
        self.refit(what)
        taken = time.perf_counter() - begun
        after = self._generate(prompt, 4, 8)

        # Sampling of an engine on a GPU need not repeat itself; of one that computes alike it does.
        same = all(torch.equal(a.token_ids, b.token_ids) for a, b in zip(before, after, strict=True))
        memory = {} if self.job.dry else {"MiB given back": asleep - awake}
        wrong = "" if self.job.dry or asleep > awake else "it gave no memory back"
        return judged(what, wrong, tokens="the same" if same else "others", seconds=taken, **memory)

    def rollouts(self, what: str) -> Row:
        """N siblings of one prompt, after a call that warms up."""
        prompt, n, tokens = SIZES[self.job.device]
        first, second = prompt_ids(self.shape.vocab, prompt, 2)
        self._generate(first, n, tokens)
        begun = time.perf_counter()
        rollouts = self._generate(second, n, tokens)
        taken = time.perf_counter() - begun

        drawn = sum(len(r.token_ids) for r in rollouts)
        itemsize, name = DTYPES[self.job.dtype].itemsize, device_name(self.job.device)
        share = decode_share(self.shape, itemsize, (prompt, n, tokens), taken, name)
        wrong = "" if drawn >= FULL * n * tokens else f"{drawn} tokens instead of {n * tokens}"
        figures = {"prompt": prompt, "N": n, "tokens": tokens, "tokens/s": drawn / taken, "seconds": taken}
        return judged(what, wrong, **figures, **({} if share is None else {"of memory roofline": share}))

    def close(self) -> None:
        """End the process, where it is up."""
        if self.engine:
            self.engine.close()

    def _update(self, named: list[tuple[str, torch.Tensor]]) -> None:
        assert self.engine
        self.engine.update_weights(seal(named), self.versions)
        self.versions += 1

    def _generate(self, prompt: list[int], n: int, tokens: int) -> list[Rollout]:
        assert self.engine
        request = Request(Prompt("0", "", tuple(prompt), None, "exact"), 7, n)
        (rollouts,) = self.engine.generate([request], Sampling(1.0, 1.0, 0, tokens, (self.shape.vocab - 1,)))
        return rollouts

    def _free_mib(self) -> float:
        return 0.0 if self.job.dry else torch.cuda.mem_get_info()[0] / 2**20
