"""SGLang's Engine as the engine process uses it, in the form of 0.5.23. Not yet run; tests run it on a contract double.

The only file that imports sglang. What it builds on was read in sgl-project/sglang 0.5.23, under python/sglang/srt:

* A request's seed counts under enable_deterministic_inference alone and is ignored without a word elsewhere
  (sampling/sampling_batch_info.py); that chooses the sampling backend "pytorch" (arg_groups/overrides.py), the one that
  takes seeds beside top-p and top-k ("flashinfer" asserts that there are none, layers/sampler.py). Random numbers are a
  hash of (64-bit seed, position in the sequence, token) (sglang/kernels/ops/sampling/murmur_hash.py).
* return_logprob reports the log of the softmax of logits / temperature, before top-k and top-p, unless
  SGLANG_RETURN_ORIGINAL_LOGPROB is set (layers/sampler.py); rollout.registry sets it to 0.
* ignore_eos ignores stop_token_ids too, and the model's own end-of-text ids stop as they do
  (managers/schedule_batch.py, Req._check_token_based_finish; configs/model_config.py, _get_hf_eos_token_id).
* An abort ends every request whose id begins with the one that it names (managers/scheduler.py, abort_request); tokens
  so far come back (managers/tokenizer_manager.py).
* max_new_tokens is cut, without a word, to context_length - 2 - the prompt's length, and a prompt may take
  context_length - 7 tokens (managers/scheduler.py, managers/tp_worker.py).
* Engine's own methods run the event loop, which is ours; the coroutines behind them are tokenizer_manager's
  (entrypoints/engine.py, managers/tokenizer_control_mixin.py).
* Tensors are loaded between begin_weight_update and end_weight_update, and are unpickled by a list of harmless names
  (managers/scheduler_components/weight_updater.py; utils/common.py, SafeUnpickler).
* release_memory_occupation asserts that nothing is in flight and forgets keys and values with their memory
  (managers/scheduler_components/weight_updater.py).
"""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import sglang
import torch
from sglang import Engine
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightsFromTensorReqInput,
)

from megatron_brorl.config.engine_keys import EngineConfig
from megatron_brorl.rollout.remote import seeds
from megatron_brorl.rollout.remote.cuda_ipc import own_device
from megatron_brorl.rollout.remote.options import Capabilities, EngineOptions, WorkerBucket
from megatron_brorl.rollout.remote.protocol import Completion, EngineLeaf, Named
from megatron_brorl.rollout.remote.sglang.extension import LOADER

_SPARE = 8  # tokens of a context that SGLang gives nobody: at most 7
_WEIGHTS, _CACHES = "weights", "kv_cache"  # tags of memory


class Llm(EngineLeaf):
    """SGLang's leaf."""

    def __init__(self, options: EngineOptions) -> None:
        """Raises ValueError where the model's own end-of-text ids would end what is to go on."""
        self.options, self.config = options, EngineConfig(**options.section)
        self._names = count()
        self._updating = False  # between begin_weight_update and end_weight_update
        foreign = _end_ids(Path(options.model)) - set(options.stop_ids)
        if foreign:
            raise ValueError(
                f"SGLang stops at token {min(foreign)}, an eos_token_id of {options.model}, and it is no stop token "
                f"here ({', '.join(map(str, options.stop_ids))}): make the tokenizer and config.json agree"
            )

    def arguments(self) -> dict[str, Any]:
        """Of SGLang's ServerArgs."""
        o, c = self.options, self.config

        # What training needs is set here; the rest is left to the engine.
        return {
            "model_path": o.model,
            "skip_tokenizer_init": True,  # ids in, ids out
            "trust_remote_code": False,
            "tp_size": c.tensor,
            "dtype": o.dtype,
            "load_format": "dummy",  # weights come from the trainer
            "custom_weight_loader": [LOADER],
            # A prompt with its response may fill the whole context of ours.
            "context_length": o.context + _SPARE,
            "max_running_requests": o.max_rows,
            "max_total_tokens": o.max_kv_tokens or None,
            "mem_fraction_static": c.memory_fraction,
            "kv_cache_dtype": "fp8_e4m3" if c.kv_dtype == "fp8" else "auto",
            "chunked_prefill_size": c.max_num_tokens,
            "disable_cuda_graph": not c.cuda_graphs,
            "enable_deterministic_inference": True,  # without it seeds are ignored
            "enable_memory_saver": True,  # or nothing is given back in a sleep
            "random_seed": 0,
            "log_level": "error",
        }

    async def start(self) -> Capabilities:
        """See EngineLeaf."""
        o = self.options
        # In this loop, so that the engine's coroutines are of it.
        self._engine = Engine(**self.arguments())
        self._manager = self._engine.tokenizer_manager

        # What the workers have room for they say when they are up.
        tokens = int(self._engine._scheduler_init_result.scheduler_infos[0]["max_total_num_tokens"])
        if tokens < o.context + _SPARE:
            raise ValueError(
                f"keys and values of {tokens} tokens fit, and one response with its prompt may take {o.context}: raise "
                "engine.memory_fraction or engine.tensor, set train.offload = true, or lower rollout.max_tokens"
            )

        # Siblings must differ, whichever engine draws them.
        name = f"SGLang {sglang.__version__}"
        await seeds.require_of_requests(self, name)
        return Capabilities(
            engine=name,
            torch=torch.__version__,
            seeds="request",
            log_probs="tempered",
            keeps_cut=True,
            if_repeating="it takes a seed per rollout, and two of them agree",
            devices=tuple(own_device(i) for i in range(self.config.tensor)),
            kv_tokens=tokens,
            rows=o.max_rows,
            details={"cuda_graphs": self.config.cuda_graphs},
        )

    def params(
        self,
        temperature: float,
        top_p: float,
        top_k: int,
        tokens: int,
        seed: int,
        log_probs: bool = True,
        stop_strings: Sequence[str] = (),
    ) -> dict[str, Any]:
        """See EngineLeaf; stop strings are refused with the configuration. Arguments of Engine.async_generate."""
        return {
            "sampling_params": {
                "temperature": temperature,
                "top_p": top_p,
                "top_k": top_k or -1,
                "max_new_tokens": tokens,
                "sampling_seed": seed,
                "stop_token_ids": list(self.options.stop_ids),
            },
            "return_logprob": log_probs,
            # With them log-probs are renormalised; a greedy token's is none.
            "top_logprobs_num": top_k if log_probs and temperature else 0,
        }

    def submit(self, ids: Sequence[int], params: dict[str, Any]) -> Named:
        """See EngineLeaf."""
        name = f"{next(self._names):020d}"  # none begins with another
        return Named(name, asyncio.create_task(self._complete(name, list(ids), params)))

    async def _complete(self, name: str, ids: list[int], params: dict[str, Any]) -> Completion:
        found = await self._engine.async_generate(input_ids=ids, rid=name, **params)
        meta = found["meta_info"]
        reported: list[Mapping[int, float]] = []
        if params["return_logprob"]:
            # (log-prob, token, None) of each token, and of the likeliest in its place.
            drawn = meta["output_token_logprobs"]
            likeliest = meta.get("output_top_logprobs") or [[]] * len(drawn)
            for (value, token, _), others in zip(drawn, likeliest, strict=True):
                reported.append({**{t: x for x, t, _ in others or []}, token: value})
        return Completion.of(found["output_ids"], meta["finish_reason"]["type"], reported)

    async def completion(self, handle: Named) -> Completion:
        """See EngineLeaf."""
        return await handle.task

    def abort(self, handle: Named) -> None:
        """See EngineLeaf."""
        self._manager.abort_request(rid=handle.name)

    async def begin(self) -> None:
        """See EngineLeaf."""
        if self._updating:  # one that broke off
            _check(await self._manager.end_weight_update(EndWeightUpdateReqInput(), None))
        _check(await self._manager.begin_weight_update(BeginWeightUpdateReqInput(), None))
        self._updating = True
        await self._tell({"kind": "begin"})

    async def load(self, bucket: WorkerBucket) -> None:
        """See EngineLeaf."""
        await self._tell({"kind": "load", "bucket": bucket})

    async def finish(self, names: Sequence[str]) -> None:
        """See EngineLeaf."""
        await self._tell({"kind": "finish", "names": list(names)})
        _check(await self._manager.end_weight_update(EndWeightUpdateReqInput(), None))
        self._updating = False
        if not (await self._manager.flush_cache()).success:
            raise ValueError("SGLang keeps keys and values of the weights before: a request is still in flight")

    async def _tell(self, message: Mapping[str, Any]) -> None:
        """Have all workers do what a message of extension.update says. Raises ValueError in the words of one that
        could not."""
        with TemporaryDirectory() as answers:
            text = json.dumps({**message, "answers": answers}).encode()
            tensor = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            request = UpdateWeightsFromTensorReqInput(
                # One each; the bytes themselves, where torch's own pickler would send descriptors of files.
                serialized_named_tensors=[pickle.dumps([("message", tensor)])] * self.config.tensor,
                load_format=LOADER,
                flush_cache=False,
            )
            _check(await self._manager.update_weights_from_tensor(request, None))
            said = [path.read_text() for path in Path(answers).iterdir()]

        if len(said) != self.config.tensor:
            raise ValueError(f"{len(said)} of {self.config.tensor} workers of SGLang answered")
        if any(said):
            raise ValueError(max(said))

    async def sleep(self) -> None:
        """See EngineLeaf."""
        await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=[_CACHES, _WEIGHTS]), None)

    async def wake(self) -> None:
        """See EngineLeaf."""
        await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=[_WEIGHTS]), None)

    async def wake_caches(self) -> None:
        """See EngineLeaf."""
        await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=[_CACHES]), None)

    async def reseed(self, seed: int) -> None:
        """See EngineLeaf: each request has a seed of its own."""


def _check(answer: tuple[bool, str]) -> None:
    """Raises ValueError in SGLang's words where it says that it did not do what was asked."""
    done, what = answer
    if not done:
        raise ValueError(f"SGLang: {what}")


def _end_ids(model: Path) -> set[int]:
    """The end-of-text ids of the model that SGLang stops at whatever it is told."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = model / name
        given = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        ids |= set(given) if isinstance(given, list) else set() if given is None else {given}
    return ids
