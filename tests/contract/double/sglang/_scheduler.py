"""The scheduler and its one worker: a model, its loader, a sampler, and a thread that generates on a CPU.

Whatever goes wrong in it ends the process, as the real one's parent ends with it.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import pickle
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
from dying import come_to
from torch import Tensor

from megatron_brorl.model_shape import read_shape
from megatron_brorl.models.hf_names import hf_shapes
from megatron_brorl.ops import philox
from megatron_brorl.ops.reference.sampling import sample
from megatron_brorl.rollout.engine import Request, Sampling
from megatron_brorl.rollout.native.engine import TorchEngine
from megatron_brorl.types import Prompt, Rollout
from sglang._settings import TOP_K_ALL, SamplingParams, ServerArgs

DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32}
SAFE = {("torch._utils", "_rebuild_tensor_v2"), ("collections", "OrderedDict"), ("torch", "uint8")}
KV_TOKENS = int(os.environ.get("BRORL_DOUBLE_KV_TOKENS", "200000"))
SEEDS = os.environ.get("BRORL_DOUBLE_SEEDS", "1") == "1"


class SafeUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda data: torch.load(io.BytesIO(data), weights_only=True)
        if (module, name) not in SAFE:
            raise RuntimeError(f"Blocked unsafe global ({module}.{name}) during pickle deserialization")
        return super().find_class(module, name)


@dataclass
class Row:
    """A request; `done` is called by the scheduler's thread."""

    rid: str
    ids: list[int]
    params: SamplingParams
    log_probs: bool
    top: int
    done: Callable[[], None]
    aborted: bool = False
    output_ids: list[int] = field(default_factory=list)
    finish: dict[str, Any] = field(default_factory=dict)
    drawn: list[tuple[float, int, None]] = field(default_factory=list)
    likeliest: list[list[tuple[float, int, None]]] = field(default_factory=list)

    def end(self, ids: list[int], kind: str) -> None:
        self.output_ids, self.finish = ids, {"type": kind}
        self.done()


class Model:
    """Parameters by their Hugging Face names, random until they are loaded."""

    def __init__(self, directory: str) -> None:
        self.shape = read_shape(Path(directory))
        generator = torch.Generator().manual_seed(7)
        shapes = hf_shapes(self.shape).items()
        self.tensors = {n: torch.nn.Parameter(0.02 * torch.randn(s, generator=generator)) for n, s in shapes}

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors.items())

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        come_to("load")
        for name, tensor in weights:
            if name in self.tensors:  # others are skipped without an error
                assert tensor.shape == self.tensors[name].shape, name
                self.tensors[name].data.copy_(tensor)


class Scheduler:
    def __init__(self, args: ServerArgs) -> None:
        self.args, self.model = args, Model(args.model_path)
        config = json.loads(Path(args.model_path, "config.json").read_text())
        end = config.get("eos_token_id")
        self.end_ids = set(end) if isinstance(end, list) else set() if end is None else {end}
        self.tokens = min(KV_TOKENS, args.max_total_tokens or KV_TOKENS)
        self.longest = min(args.context_length or self.tokens, self.tokens) - 1
        self.deterministic = args.enable_deterministic_inference and SEEDS
        self._generator = torch.Generator().manual_seed(args.random_seed or 0)

        self.session = self.loaded = self.cached = self.stale = False
        self.asleep: set[str] = set()
        self._rows: dict[int, Row] = {}  # of the sampler, by the key that the CPU engine knows them by
        self._open: set[str] = set()  # ids of what has not ended
        self._busy = threading.RLock()
        self._queue: SimpleQueue[Row] = SimpleQueue()
        shape, rows = self.model.shape, args.max_running_requests or 64
        device = torch.device("cpu")
        self._torch = TorchEngine(shape, hf_shapes(shape), device, DTYPES[args.dtype], rows, self._sample)
        threading.Thread(target=self._run, daemon=True).start()

    @contextmanager
    def _fatal(self) -> Iterator[None]:
        """Alone with the model; an exception ends the process."""
        with self._busy:
            try:
                yield
            except BaseException:
                traceback.print_exc()
                os._exit(1)

    # Weights and memory.

    def begin(self, obj: Any) -> tuple[bool, str]:
        with self._fatal():
            if self.session:
                return False, "a weight-update session is already open; call end_weight_update() first"
            self.session = True
            return True, "Success"

    def update(self, obj: Any) -> tuple[bool, str]:
        with self._fatal():
            if not self.session:
                message = "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"
                return False, message
            assert "weights" not in self.asleep, "weights are loaded into memory that was given back"
            assert len(obj.serialized_named_tensors) == self.args.tp_size
            named = SafeUnpickler(io.BytesIO(obj.serialized_named_tensors[0])).load()
            named = [(name, tensor.to("cpu")) for name, tensor in named]
            if obj.load_format in (self.args.custom_weight_loader or []):
                module, _, name = obj.load_format.rpartition(".")
                getattr(importlib.import_module(module), name)(self.model, named)
            elif obj.load_format is None:
                self.model.load_weights(named)
            else:
                raise NotImplementedError(f"Unknown load_format={obj.load_format}")
            self.loaded, self.stale = False, self.cached
            if obj.flush_cache and not self.flush():
                return False, "Weights were updated, but the cache was not flushed"
            return True, "Success"

    def end(self, obj: Any) -> tuple[bool, str]:
        with self._fatal():
            if not self.session:
                return False, "no weight-update session is open; call begin_weight_update() first"
            come_to("end")
            self.session = False
            return True, "Success"

    def flush(self) -> bool:
        with self._fatal():
            if self._open:
                return False
            self.cached = self.stale = False
            return True

    def release(self, obj: Any) -> None:
        with self._fatal():
            come_to("sleep")
            assert not self._open, "release_memory_occupation should be called only when server is idle."
            assert self.args.enable_memory_saver, "nothing is given back"
            tags = set(obj.tags or ("kv_cache", "weights", "cuda_graph"))
            assert tags <= {"kv_cache", "weights", "cuda_graph"}, tags
            self.asleep |= tags
            if "kv_cache" in tags:
                self.cached = self.stale = False
            if "weights" in tags:
                for x in self.model.tensors.values():
                    x.data.fill_(float("nan"))
                self.loaded = False

    def resume(self, obj: Any) -> None:
        with self._fatal():
            for tag in obj.tags or ("kv_cache", "weights", "cuda_graph"):
                self.asleep.remove(tag)

    # Generation.

    def submit(self, row: Row) -> None:
        self._open.add(row.rid)
        self._queue.put(row)

    def _run(self) -> None:
        while True:
            rows = [self._queue.get()]
            with self._fatal():
                try:
                    while True:
                        rows.append(self._queue.get_nowait())
                except Empty:
                    pass
                self._generate(rows)

    def _generate(self, rows: list[Row]) -> None:
        assert not self.session, "generate in the middle of an update"
        assert not self.asleep, f"generate while {self.asleep} sleep"
        assert not self.stale, "keys and values of other weights would be found by their prefix"
        self.cached = True
        if not self.loaded:
            self._torch.update_weights(((n, x.data) for n, x in self.model.tensors.items()), 0)
            self.loaded = True

        # Those of the same settings together.
        kinds: dict[Sampling, list[Row]] = {}
        for row in rows:
            p = row.params
            stops = () if p.ignore_eos else tuple(sorted({*(p.stop_token_ids or ()), *self.end_ids}))
            tokens = max(0, min(p.max_new_tokens or 1 << 30, self.longest - len(row.ids) - 1))
            top_k = 0 if p.top_k == TOP_K_ALL else p.top_k
            cuts = (0.0, 1.0, 0) if top_k == 1 else (p.temperature, p.top_p, top_k)
            kinds.setdefault(Sampling(*cuts, tokens, stops), []).append(row)
        for sampling, same in kinds.items():
            self._rows = dict(enumerate(same))
            asked = [Request(Prompt(str(i), "", tuple(row.ids), None, ""), i, 1) for i, row in self._rows.items()]
            found = self._torch.generate(asked, sampling, _Watch(self, same))
            for row, group in zip(same, found, strict=True):
                if not row.finish:  # aborted
                    self._end(row, group[0].token_ids.tolist() if group else [], "abort")

    def _end(self, row: Row, ids: list[int], kind: str) -> None:
        self._open.discard(row.rid)
        row.end(ids, kind)

    def _sample(
        self, logits: Tensor, keys: Tensor, index: Tensor, position: Tensor, temperature: Any, top_p: Any, top_k: Any
    ) -> tuple[Tensor, Tensor]:
        rows = [self._rows[key] for key in keys.tolist()]
        if self.deterministic:
            seeds = torch.tensor([42 if r.params.sampling_seed is None else r.params.sampling_seed for r in rows])
            places = position + torch.tensor([len(row.ids) for row in rows])
            us = philox.uniforms(seeds, torch.zeros_like(places), places)
        else:
            us = torch.rand(len(rows), dtype=torch.float64, generator=self._generator)
        ids, log_probs = sample(logits, us, temperature, top_p, top_k)
        values = (logits.float() / (temperature or 1.0)).log_softmax(-1)
        for i, row in enumerate(rows):
            row.drawn.append((float(values[i, ids[i]]), int(ids[i]), None))
            best = values[i].topk(row.top)
            row.likeliest.append(
                [(x, t, None) for x, t in zip(best.values.tolist(), best.indices.tolist(), strict=True)]
            )
        return ids, log_probs


class _Watch:
    """Delivers rows as they end; the CPU engine stops when every row that is left was aborted."""

    def __init__(self, scheduler: Scheduler, rows: list[Row]) -> None:
        self.scheduler, self.rows = scheduler, rows

    def finished(self, request: int, rollout: Rollout) -> None:
        come_to("row")
        self.scheduler._end(self.rows[request], rollout.token_ids.tolist(), rollout.finish)

    def cancelled(self) -> bool:
        left = [row for row in self.rows if not row.finish]
        return bool(left) and all(row.aborted for row in left)
