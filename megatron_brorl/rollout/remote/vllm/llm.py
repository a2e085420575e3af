"""Engine backend for vLLM 0.32 or newer, on CPUs and GPUs.

Only this file and extension.py import vllm.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from megatron_brorl.rollout.registry import HEARTBEAT_TIMEOUT_S, MAX_NUM_TOKENS, graph_sizes
from megatron_brorl.rollout.remote.protocol import Capabilities, Completion, EngineBackend, EngineOptions

EXTENSION = "megatron_brorl.rollout.remote.vllm.extension.VllmWorkerExtension"
_SPARE_TOKENS = 2 * 512  # for cache pages that are partly filled
# Fraction of the GPU's memory that must be free, or vLLM does not start (default 0.92). vLLM checks it even if
# the size of the KV cache is given, and it has no other effect then. A trainer on the same GPU may leave less memory.
_FREE_SHARE = 0.01
_WATCH_S = 1.0  # seconds between checks that vLLM's own processes are alive


class VllmBackend(EngineBackend):
    """The backend of vLLM. EngineBackend describes the methods."""

    def __init__(self, options: EngineOptions) -> None:
        """Raise ValueError if vLLM does not support the options on this machine."""
        self.options = options
        self.config = EngineConfig(**options.section)
        self.on_gpu = torch.cuda.is_available()
        self._names = count()  # of requests in vLLM
        self._aborting: set[asyncio.Task[None]] = set()
        if self.config.quantization == "fp8" and not self.on_gpu:
            raise ValueError("engine.quantization = 'fp8' needs a GPU: set 'none'")
        # vLLM's second model runner records the experts, and needs Triton. The CPU build of 0.32 runs without Triton.
        if options.routes and not self.on_gpu:
            raise ValueError("rollout.replay_routes: vLLM returns the chosen experts only on a GPU: set 'never'")
        # vLLM's own process inherits these variables.
        if options.threads and not self.on_gpu:
            os.environ["OMP_NUM_THREADS"] = str(options.threads)
        if self.on_gpu:
            # Otherwise vLLM falls back to its first model runner, which samples rows with seeds one by one.
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

    def _kv_bytes(self) -> int:
        """Return the size of the KV cache per device in bytes: for all rollouts at full length, or as much as fits.

        Raises ValueError if not even one response fits.
        """
        options = self.options
        shape = read_shape(Path(self.options.model))
        element_bytes = 1 if self.config.kv_dtype == "fp8" else getattr(torch, options.dtype).itemsize
        device_heads = -(-shape.kv_heads // self.config.tensor)
        per_token = 2 * shape.layers * device_heads * shape.head_dim * element_bytes  # of keys and values

        available = options.max_kv_tokens * per_token if self.on_gpu else options.kv_bytes
        needed = (options.max_rows * options.context + _SPARE_TOKENS) * per_token
        num_bytes = min(needed, available) if available else needed
        if num_bytes < options.context * per_token:
            key = "engine.memory_fraction" if self.on_gpu else "rollout.kv_cache_mib"
            raise ValueError(
                f"keys and values of {num_bytes // per_token} tokens fit, and one response with its prompt may take "
                f"{options.context}: raise {key} or lower rollout.max_tokens"
            )
        return num_bytes

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of vLLM's AsyncEngineArgs. Raises ValueError if no response would fit."""
        options = self.options
        config = self.config

        # On CPUs, vLLM crashes with seeds and chunked prefill, and eager mode starts faster.
        if self.on_gpu:
            device_arguments: dict[str, Any] = {
                "enable_sleep_mode": True,
                "sleep_mode_offload_cudagraph": True,
                "enforce_eager": not config.cuda_graphs,
                "compilation_config": {"cudagraph_capture_sizes": graph_sizes(options.max_rows)},
                "gpu_memory_utilization": _FREE_SHARE,
            }
        else:
            device_arguments = {"enable_chunked_prefill": False, "enforce_eager": True}
        if config.quantization == "fp8":
            device_arguments["quantization"] = "fp8"  # vLLM quantizes each weight when it is loaded

        # Set only the arguments that training needs.
        return {
            "model": options.model,
            # Prompts and responses are token ids. Only stop strings need text.
            "skip_tokenizer_init": not (options.stop_strings or options.agents),
            "trust_remote_code": False,
            "tensor_parallel_size": config.tensor,
            "dtype": options.dtype,
            "hf_overrides": {"head_dtype": "float32"},  # fp32 logits, as in the trainer
            "load_format": "dummy",  # the trainer sends the weights
            "max_model_len": options.context,
            "max_num_seqs": options.max_rows,
            # No prompt, continued rollouts included, may be split into chunks.
            "max_num_batched_tokens": max(MAX_NUM_TOKENS, options.context, options.max_rows),
            # Siblings share the cache blocks of their prompt.
            "enable_prefix_caching": True,
            "kv_cache_memory_bytes": self._kv_bytes(),
            "kv_cache_dtype": config.kv_dtype,
            "logprobs_mode": "processed_logprobs",  # log-probabilities of the sampling distribution
            "worker_extension_cls": EXTENSION,
            "generation_config": "vllm",  # ignore the model's generation_config.json
            "disable_log_stats": True,
            "enable_return_routed_experts": options.routes,
            **device_arguments,
        }

    async def start(self) -> Capabilities:
        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**self.arguments()))
        self._watching = asyncio.create_task(self._watch())
        return Capabilities(
            engine=f"vLLM {vllm.__version__}",
            kv_tokens=min(await self.call_workers("brorl_kv_tokens")),
            rows=self.options.max_rows,
        )

    def params(self, sampling: Sampling, tokens: int, seed: int) -> SamplingParams:
        return SamplingParams(
            n=1,  # one request per sibling, because with n > 1 vLLM uses consecutive seeds
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=seed,
            max_tokens=tokens,
            stop_token_ids=list(self.options.stop_ids),
            stop=list(sampling.stop_strings),
            ignore_eos=True,  # stop_token_ids includes the EOS tokens
            logprobs=0 if sampling.log_probs else None,  # only of the sampled token
            flat_logprobs=True,
            detokenize=bool(sampling.stop_strings),
            skip_special_tokens=False,  # a stop string may be the text of a special token
            spaces_between_special_tokens=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def submit(self, ids: Sequence[int], params: Any) -> tuple[str, asyncio.Task[Completion]]:
        """See EngineBackend. The handle is the request's name in vLLM and a task."""
        name = str(next(self._names))
        return name, asyncio.create_task(self._complete(name, list(ids), params))

    async def _complete(self, name: str, ids: list[int], params: SamplingParams) -> Completion:
        last_output: Any = None
        try:
            async for output in self._llm.generate(TokensPrompt(prompt_token_ids=ids), params, name):
                last_output = output
        except EngineDeadError as e:
            _exit_process(f"vLLM's engine core is gone: {e}")

        # A request that is aborted before it starts has no output.
        if last_output is None:
            return Completion(token_ids=[], finish="cut", log_probs=[])
        result = last_output.outputs[0]
        reported: list[Mapping[int, float]] = []
        if params.logprobs is not None:
            flat = result.logprobs
            reported = [{token: x} for token, x in zip(flat.token_ids, flat.logprobs, strict=True)]
        completion = Completion.of(result.token_ids, result.finish_reason, reported)
        if result.routed_experts is None:
            return completion
        # vLLM returns uint8, or uint16 with more than 256 experts. PyTorch has few operations for uint16.
        routes = torch.from_numpy(result.routed_experts)
        return replace(completion, routes=routes.to(torch.int16) if routes.dtype == torch.uint16 else routes)

    async def _watch(self) -> None:
        """Check periodically that vLLM's engine core answers.

        The core answers between two steps, and each step waits for all workers. Without this check, this process would
        keep sending heartbeats while a worker hangs.
        """
        while True:
            try:
                await asyncio.wait_for(self._llm.is_paused(), HEARTBEAT_TIMEOUT_S)
            except TimeoutError:
                _exit_process(f"vLLM's engine core or a worker is silent for {HEARTBEAT_TIMEOUT_S:g} s")
            except EngineDeadError as e:
                _exit_process(f"vLLM's engine core is gone: {e}")
            await asyncio.sleep(_WATCH_S)

    async def completion(self, handle: tuple[str, asyncio.Task[Completion]]) -> Completion:
        return await handle[1]

    def abort(self, handle: tuple[str, asyncio.Task[Completion]]) -> None:
        task = asyncio.create_task(self._llm.abort(handle[0]))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        results: list[Any] = await self._llm.collective_rpc(method, args=args)
        return results

    async def begin(self) -> None:
        await self.call_workers("brorl_begin")

    async def finish(self) -> None:
        await super().finish()
        if not await self._llm.reset_prefix_cache():
            raise ValueError("vLLM kept the prefix cache of the old weights, because a request is in flight")

    async def sleep(self) -> None:
        """See EngineBackend. vLLM has no sleep mode on CPUs."""
        await self._llm.reset_prefix_cache()
        if self.on_gpu:
            await self._llm.sleep(2)  # level 2 drops the weights, which are sent again

    async def wake(self) -> None:
        if self.on_gpu:
            await self._llm.wake_up(["weights"])

    async def wake_caches(self) -> None:
        if self.on_gpu:
            await self._llm.wake_up(["kv_cache"])


def _exit_process(reason: str) -> NoReturn:
    """Log the reason and end this process, because its engine no longer works. The trainer starts a new process."""
    print(reason, file=sys.stderr, flush=True)
    os._exit(1)
