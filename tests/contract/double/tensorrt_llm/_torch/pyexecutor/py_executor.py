"""The engine of a worker: model, weight loader, sampler, and a thread that generates on a CPU."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import torch
from fp8_blocks import dequantize
from torch import Tensor

from megatron_brorl.families.shape import read_shape
from megatron_brorl.models.weights.names import hf_shapes
from megatron_brorl.ops import philox
from megatron_brorl.ops.reference.sampling import sample, sampling_log_probs
from megatron_brorl.rollout.engine import Request, Sampling
from megatron_brorl.rollout.native.torch_engine import TorchEngine
from megatron_brorl.types import Prompt, Rollout
from tensorrt_llm._double import fault_point
from tensorrt_llm._torch.pyexecutor.resource_manager import KVCacheManager, ResourceManager, ResourceManagerType

DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass
class Row:
    """A request. The engine's thread calls `done` with the sampled tokens."""

    ids: list[int]
    params: Any
    done: Callable[[Rollout | None, list[dict[int, Logprob]]], None]
    aborted: bool = False
    reported: list[dict[int, Logprob]] = field(default_factory=list)


class Model:
    """Hugging Face tensors, which are random before the first update."""

    def __init__(self, directory: str, quantized: bool) -> None:
        self.shape = read_shape(directory)
        self.quantized = quantized
        generator = torch.Generator().manual_seed(7)
        self.tensors = {n: 0.02 * torch.randn(s, generator=generator) for n, s in hf_shapes(self.shape).items()}
        self.changed = True  # whether the CPU engine has yet to load the tensors

    def post_load_weights(self) -> None:
        fault_point("finish")
        self.changed = True

    def drop(self) -> None:
        for tensor in self.tensors.values():
            tensor.fill_(float("nan"))
        self.changed = True


class ModelLoader:
    def reload(self, model: Model, weights: dict[str, Tensor], allow_partial_loading: bool = False) -> None:
        fault_point("load")
        if not allow_partial_loading and weights.keys() != model.tensors.keys():
            raise ValueError("missing weights")
        for name, tensor in weights.items():
            if name not in model.tensors:
                continue
            if tensor.dtype == torch.float8_e4m3fn:
                if not model.quantized:
                    raise ValueError(f"{name}: float8 for a model without quantization_config")
                tensor = dequantize(tensor, weights[f"{name}_scale_inv"])
            elif model.quantized and name.endswith("_proj.weight"):
                raise ValueError(f"{name}: {tensor.dtype} for a model in float8")
            if tensor.shape != model.tensors[name].shape:
                raise ValueError(f"{name}: shape {tuple(tensor.shape)}")
            model.tensors[name].copy_(tensor)
        model.changed = True


class ModelEngine:
    def __init__(self, model: Model) -> None:
        self.model, self.model_loader = model, ModelLoader()


class Sampler:
    """TorchSampler, which samples with the seed of each request."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}  # by their key in the CPU engine

    def __call__(
        self, logits: Tensor, keys: Tensor, _: Tensor, position: Tensor, temperature: float, top_p: float, top_k: int
    ) -> tuple[Tensor, Tensor]:
        rows = [self.rows[key] for key in keys.tolist()]
        seeds = torch.tensor([row.params.seed or 0 for row in rows])
        uniforms = philox.uniforms(seeds, torch.zeros_like(position), position)
        ids, log_probs = sample(logits, uniforms, temperature, top_p, top_k)
        for i, row in enumerate(rows):
            row.reported.append(self._report(logits[i], int(ids[i]), row.params, temperature))
        return ids, log_probs

    def _report(self, logits: Tensor, token: int, params: Any, temperature: float) -> dict[int, Logprob]:
        if params.logprobs is None:
            return {}
        values = logits.float().log_softmax(-1)
        if params.logprobs_mode == "processed" and temperature:
            values = sampling_log_probs(logits[None], temperature, params.top_p, params.top_k)[0]
        tokens = {token, *(values.topk(params.logprobs).indices.tolist() if params.logprobs > 1 else [])}
        return {t: Logprob(float(values[t])) for t in tokens}


class PyExecutor:
    """The engine of a worker (self.engine)."""

    def __init__(self, args: Any) -> None:
        quantized = bool((args.model_kwargs or {}).get("quantization_config"))
        model = Model(args.model, quantized)
        self.model_engine = ModelEngine(model)
        self.sampler = Sampler()
        self.asleep: set[str] = set()
        self.lost: set[str] = set()  # tags whose memory a sleep did not restore
        self.args = args
        self.kv_cache_manager = KVCacheManager(args.kv_cache_config)
        self.resource_manager = ResourceManager({ResourceManagerType.KV_CACHE_MANAGER: self.kv_cache_manager})
        self.prefixes = self.dangling = False  # whether prefixes are cached, and whether their memory was released
        self._busy = threading.Lock()
        self._queue: SimpleQueue[Row] = SimpleQueue()
        self._keys = 0
        dtype = DTYPES[args.dtype]
        self._torch = TorchEngine(
            model.shape, hf_shapes(model.shape), torch.device("cpu"), dtype, args.max_batch_size, self.sampler
        )
        threading.Thread(target=self._run, daemon=True).start()

    @contextmanager
    def control_action(self) -> Iterator[None]:
        with self._busy:
            yield

    def reset_prefix_cache(self) -> None:
        self.prefixes = self.dangling = False

    def release(self, tags: set[str]) -> None:
        self.asleep |= tags
        self.dangling |= self.prefixes and "kv_cache" in tags

    def submit(self, row: Row) -> None:
        self._queue.put(row)

    def _run(self) -> None:
        while True:
            rows = [self._queue.get()]
            with self._busy:
                try:
                    while True:
                        rows.append(self._queue.get_nowait())
                except Empty:
                    pass
                groups: dict[Any, list[Row]] = {}
                for row in rows:
                    p = row.params
                    stops = tuple(sorted({p.end_id, *(p.stop_token_ids or [])} - {-1}))
                    groups.setdefault((p.temperature, p.top_p, p.top_k, p.max_tokens, stops, p.greedy), []).append(row)
                try:
                    for settings, group in groups.items():
                        self._generate(group, *settings)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)

    def _generate(
        self, rows: list[Row], temperature: Any, top_p: Any, top_k: Any, max_tokens: int, stops: Any, greedy: bool
    ) -> None:
        if self.lost:
            raise SystemError(f"generate with {self.lost} lost in a sleep")
        if self.asleep or self.dangling:
            raise SystemError(f"generate with released memory ({self.asleep}) or prefixes that point to it")
        self.prefixes = True
        model = self.model_engine.model
        if model.changed:
            self._torch.update_weights(model.tensors.items(), version=0)
            model.changed = False
        temperature = 0.0 if greedy else (1.0 if temperature is None else temperature)
        sampling = Sampling(temperature, 1.0 if top_p is None else top_p, top_k or 0, max_tokens, stops)
        self._keys += len(rows)
        keys = range(self._keys - len(rows), self._keys)
        self.sampler.rows = dict(zip(keys, rows, strict=True))
        pairs = self.sampler.rows.items()
        requests = [Request(Prompt(str(key), "", tuple(row.ids), None, ""), key, n=1) for key, row in pairs]
        callbacks = _Watch(rows)
        self._torch.generate(requests, sampling, callbacks)
        for row in callbacks.unfinished:
            row.done(None, row.reported)


class _Watch:
    """Deliver finished rows, and stop the CPU engine when all remaining rows are aborted."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        self.unfinished = list(rows)

    def finished(self, request: int, rollout: Rollout) -> None:
        row = self.rows[request]
        self.unfinished.remove(row)
        fault_point("row")
        row.done(rollout, row.reported)

    def cancelled(self) -> bool:
        return all(row.aborted for row in self.unfinished)
