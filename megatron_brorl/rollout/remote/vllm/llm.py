"""vLLM's AsyncLLM as the engine process uses it, from 0.32 on, on CPUs and on GPUs.

With extension.py the only file that imports vllm. Not yet run on a GPU.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import torch
import vllm
from vllm import SamplingParams, TokensPrompt
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from megatron_brorl.config.schema import EngineConfig
from megatron_brorl.families.shape import read_shape
from megatron_brorl.rollout.engine import Sampling
from megatron_brorl.rollout.remote.protocol import (
    Capabilities,
    Completion,
    EngineBackend,
    EngineOptions,
    check_sampling,
)

EXTENSION = "megatron_brorl.rollout.remote.vllm.extension.VllmWorkerExtension"
_SPARE_TOKENS = 2 * 512  # of pages that requests fill in part
# Of the GPU's whole memory. vLLM does not start unless this share is free (0.92 by default), even where the bytes for
# keys and values are given. A trainer on the same GPU may hold more than the rest. Nothing else depends on it then.
_FREE_SHARE = 0.01
_WATCH_S = 1.0  # between two questions whether vLLM's own processes are alive


class VllmBackend(EngineBackend):
    """vLLM's leaf."""

    def __init__(self, options: EngineOptions) -> None:
        """Raises ValueError where vLLM cannot do what is asked here."""
        self.options = options
        self.config = EngineConfig(**options.section)
        self.on_gpu = torch.cuda.is_available()
        self._names = count()
        self._aborting: set[asyncio.Task[None]] = set()
        if self.config.quantization == "fp8" and not self.on_gpu:
            raise ValueError("engine.quantization = 'fp8' needs a GPU: set 'none'")
        if options.threads and not self.on_gpu:
            os.environ["OMP_NUM_THREADS"] = str(options.threads)  # the engine's own process inherits it

    def _kv_bytes(self) -> int:
        """Of keys and values on each of the engine's devices: what all rows take at their longest, or what there is
        room for. Raises ValueError where not even one response fits."""
        options = self.options
        shape = read_shape(Path(self.options.model))
        size = 1 if self.config.kv_dtype == "fp8" else getattr(torch, options.dtype).itemsize
        per_token = 2 * shape.layers * -(-shape.kv_heads // self.config.tensor) * shape.head_dim * size

        room = options.max_kv_tokens * per_token if self.on_gpu else options.kv_bytes
        needed = (options.max_rows * options.context + _SPARE_TOKENS) * per_token
        found = min(needed, room) if room else needed
        if found < options.context * per_token:
            key = "engine.memory_fraction" if self.on_gpu else "rollout.kv_cache_mib"
            raise ValueError(
                f"keys and values of {found // per_token} tokens fit, and one response with its prompt may take "
                f"{options.context}: raise {key} or lower rollout.max_tokens"
            )
        return found

    def arguments(self) -> dict[str, Any]:
        """Of vLLM's AsyncEngineArgs. Raises ValueError where no response would fit."""
        options = self.options
        config = self.config

        # What differs between devices. vLLM's seeds crash under chunked prefill on CPUs, and eager code starts sooner.
        if self.on_gpu:
            own: dict[str, Any] = {
                "enable_sleep_mode": True,
                "enforce_eager": not config.cuda_graphs,
                "gpu_memory_utilization": _FREE_SHARE,
            }
        else:
            own = {"enable_chunked_prefill": False, "enforce_eager": True}
        if config.quantization == "fp8":
            own["quantization"] = "fp8"  # of each weight, by vLLM, as it comes

        # What training needs is set here; the rest is left to the engine.
        return {
            "model": options.model,
            # Ids in, ids out; stop strings alone need text.
            "skip_tokenizer_init": not options.stop_strings,
            "trust_remote_code": False,
            "tensor_parallel_size": config.tensor,
            "dtype": options.dtype,
            "load_format": "dummy",  # weights come from the trainer
            "max_model_len": options.context,
            "max_num_seqs": options.max_rows,
            # Neither a prompt nor a rollout that goes on may be cut into pieces.
            "max_num_batched_tokens": max(config.max_num_tokens, options.context, options.max_rows),
            # Siblings find the blocks of their prompt by its prefix.
            "enable_prefix_caching": True,
            "kv_cache_memory_bytes": self._kv_bytes(),
            "kv_cache_dtype": config.kv_dtype,
            "logprobs_mode": "processed_logprobs",  # of the distribution that tokens are drawn from
            "worker_extension_cls": EXTENSION,
            "generation_config": "vllm",  # none of the model's own settings
            "disable_log_stats": True,
            **own,
        }

    async def start(self) -> Capabilities:
        """See EngineBackend."""
        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**self.arguments()))

        name = f"vLLM {vllm.__version__}"
        await check_sampling(self, name)
        self._watching = asyncio.create_task(self._watch())
        return Capabilities(
            engine=name,
            kv_tokens=min(await self.call_workers("brorl_kv_tokens")),
            rows=self.options.max_rows,
        )

    def params(self, sampling: Sampling, tokens: int, seed: int) -> SamplingParams:
        """See EngineBackend."""
        return SamplingParams(
            n=1,  # a request per sibling: vLLM would count seeds up from one to the next
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=seed,
            max_tokens=tokens,
            stop_token_ids=list(self.options.stop_ids),
            stop=list(sampling.stop_strings),
            ignore_eos=True,  # the ids above are all
            logprobs=0 if sampling.log_probs else None,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=bool(sampling.stop_strings),
            skip_special_tokens=False,  # a stop string may be the text of one
            spaces_between_special_tokens=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def submit(self, ids: Sequence[int], params: Any) -> tuple[str, asyncio.Task[Completion]]:
        """See EngineBackend: vLLM knows a request by a name."""
        name = str(next(self._names))
        return name, asyncio.create_task(self._complete(name, list(ids), params))

    async def _complete(self, name: str, ids: list[int], params: SamplingParams) -> Completion:
        found: Any = None
        try:
            async for output in self._llm.generate(TokensPrompt(prompt_token_ids=ids), params, name):
                found = output
        except EngineDeadError as e:
            _end(f"vLLM's engine core is gone: {e}")

        # A request that was aborted before it began has no output.
        if found is None:
            return Completion([], "cut", [])
        drawn = found.outputs[0]
        reported: list[Mapping[int, float]] = []
        if params.logprobs is not None:
            flat = drawn.logprobs
            reported = [{token: x} for token, x in zip(flat.token_ids, flat.logprobs, strict=True)]
        return Completion.of(drawn.token_ids, drawn.finish_reason, reported)

    async def _watch(self) -> None:
        """Ask vLLM's engine core for a sign of life, again and again.

        It answers between two steps or calls, each of which waits for all workers: where one of them stands still, this
        process would send its heartbeats for ever, and a call of a refit has no other limit.
        """
        limit = self.config.heartbeat_timeout_s
        while True:
            try:
                await asyncio.wait_for(self._llm.is_paused(), limit)
            except TimeoutError:
                _end(f"vLLM's engine core or a worker is silent for {limit:g} s (engine.heartbeat_timeout_s)")
            except EngineDeadError as e:
                _end(f"vLLM's engine core is gone: {e}")
            await asyncio.sleep(_WATCH_S)

    async def completion(self, handle: tuple[str, asyncio.Task[Completion]]) -> Completion:
        """See EngineBackend."""
        return await handle[1]

    def abort(self, handle: tuple[str, asyncio.Task[Completion]]) -> None:
        """See EngineBackend."""
        task = asyncio.create_task(self._llm.abort(handle[0]))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        """See EngineBackend."""
        found: list[Any] = await self._llm.collective_rpc(method, args=args)
        return found

    async def finish(self, names: Sequence[str]) -> None:
        """See EngineBackend."""
        await super().finish(names)
        if not await self._llm.reset_prefix_cache():
            raise ValueError("vLLM keeps keys and values of the weights before: a request is still in flight")

    async def sleep(self) -> None:
        """See EngineBackend. On a CPU vLLM keeps what it has."""
        await self._llm.reset_prefix_cache()
        if self.on_gpu:
            await self._llm.sleep(2)  # weights follow, and are not kept

    async def wake(self) -> None:
        """See EngineBackend."""
        if self.on_gpu:
            await self._llm.wake_up(["weights"])

    async def wake_caches(self) -> None:
        """See EngineBackend."""
        if self.on_gpu:
            await self._llm.wake_up(["kv_cache"])


def _end(why: str) -> NoReturn:
    """End this process, whose engine answers nothing any more; the trainer reads why and starts another."""
    print(why, file=sys.stderr, flush=True)
    os._exit(1)
