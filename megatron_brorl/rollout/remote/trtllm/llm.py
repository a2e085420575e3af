"""Engine backend for TensorRT-LLM 1.3.0rc29 or newer.

Only this file and extension.py import tensorrt_llm. Not yet run on a GPU; tests run it on a fake tensorrt_llm
(tests/contract/double).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorrt_llm
from tensorrt_llm import AsyncLLM, SamplingParams
from tensorrt_llm.llmapi.llm_args import (
    CapacitySchedulerPolicy,
    CudaGraphConfig,
    ExecutorMemoryType,
    KvCacheConfig,
    SchedulerConfig,
    SleepConfig,
)
from tensorrt_llm.sampling_params import LogprobMode

from megatron_brorl.config.schema import EngineConfig
from megatron_brorl.rollout.engine import Sampling
from megatron_brorl.rollout.registry import MAX_NUM_TOKENS, graph_sizes
from megatron_brorl.rollout.remote.protocol import Capabilities, Completion, EngineBackend, EngineOptions
from megatron_brorl.rollout.remote.trtllm import ray_node

_KV_CACHE = "kv_cache"  # memory tag
_WEIGHTS = ("model_weights", "draft_model_weights")  # memory tags
EXTENSION = "megatron_brorl.rollout.remote.trtllm.extension.TrtllmWorkerExtension"
# Weights in FP8 with a scale per 128 x 128 block (weights_in_trainer.to_fp8_blocks).
_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


class TrtllmBackend(EngineBackend):
    """The backend of TensorRT-LLM. EngineBackend describes the methods."""

    def __init__(self, options: EngineOptions) -> None:
        """Start Ray and TensorRT-LLM. Raises ValueError if not even one response fits."""
        self.options = options
        self.config = EngineConfig(**options.section)
        # Memory that a sleep frees. Tags that start with _ are internal.
        self.tags = [str(tag.value) for tag in ExecutorMemoryType if not str(tag.value).startswith("_")]

        # Log-probability buffers and CUDA graphs have this batch size, so it is at most the number of rows that fit.
        self.rows = options.max_rows
        if options.max_kv_tokens:
            self.rows = self._fitting(options.max_kv_tokens)

        self.ray = ray_node.start(self.config.tensor)
        self._llm = self._build()

    def _fitting(self, kv_tokens: int) -> int:
        """Return how many requests run together if keys and values of `kv_tokens` tokens fit.

        The scheduler reserves the whole context for each request. Raises ValueError if not even one request fits.
        """
        rows = kv_tokens // self.options.context
        if not rows:
            raise ValueError(
                f"keys and values of {kv_tokens} tokens fit, and one response with its prompt may take "
                f"{self.options.context}: raise engine.memory_fraction or engine.tensor, set train.offload = true, or "
                "lower rollout.max_tokens"
            )
        return min(self.rows, rows)

    def _build(self) -> Any:
        options = self.options
        config = self.config

        # Set only the arguments that training needs. sampler_type was removed in August 2026, and TorchSampler was the
        # default before.
        return AsyncLLM(
            model=options.model,
            skip_tokenizer_init=True,  # prompts and responses are token ids
            tensor_parallel_size=config.tensor,
            dtype=options.dtype,
            load_format="dummy",  # the trainer sends the weights
            model_kwargs={"quantization_config": _FP8} if config.quantization == "fp8" else None,
            max_batch_size=self.rows,
            # Prompts, continued rollouts included, may be as long as the context.
            max_input_len=options.context,
            max_seq_len=options.context,
            max_num_tokens=max(MAX_NUM_TOKENS, options.context),
            # Siblings share the cache blocks of their prompt. The smaller of both limits applies; max_tokens leaves the
            # memory that the trainer allocates later.
            kv_cache_config=KvCacheConfig(
                enable_block_reuse=True,
                free_gpu_memory_fraction=config.memory_fraction,
                max_tokens=options.max_kv_tokens or None,
                dtype=config.kv_dtype,
                # The second manager, which "auto" may select, does not report the number of blocks (brorl_kv_tokens).
                use_kv_cache_manager_v2=False,
            ),
            # MAX_UTILIZATION evicts and recomputes requests. With many more requests than fit, that cost 40% of the
            # throughput (TensorRT-LLM issue 16827).
            scheduler_config=SchedulerConfig(capacity_scheduler_policy=CapacitySchedulerPolicy.GUARANTEED_NO_EVICT),
            # A graph has one batch size. Without padding, other batch sizes would run without a graph.
            cuda_graph_config=(
                CudaGraphConfig(batch_sizes=graph_sizes(self.rows), enable_padding=True) if config.cuda_graphs else None
            ),
            # Weights are sent again after a sleep, and the KV cache is empty. All other memory is restored, for example
            # rotary embeddings (tag "model") and the sampler's state.
            sleep_config=SleepConfig(
                restore_modes={
                    ExecutorMemoryType(tag): "NONE" if tag in (_KV_CACHE, *_WEIGHTS) else "CPU" for tag in self.tags
                }
            ),
            ray_worker_extension_cls=EXTENSION,  # adds the brorl_ methods to every worker
        )

    async def start(self) -> Capabilities:
        await self._llm
        tokens = min(await self.call_workers("brorl_kv_tokens"))
        return Capabilities(f"TensorRT-LLM {tensorrt_llm.__version__}", tokens, rows=self._fitting(tokens))

    def params(self, sampling: Sampling, tokens: int, seed: int) -> SamplingParams:
        """See EngineBackend. config.rules refuses stop strings with this engine.

        All parameters are explicit, because TensorRT-LLM samples greedily without temperature, top_p and top_k.
        """
        stop = list(self.options.stop_ids)
        return SamplingParams(
            end_id=stop[0],
            pad_id=stop[0],
            max_tokens=tokens,
            stop_token_ids=stop,
            include_stop_str_in_output=True,  # keep the stop token and its log-probability
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=seed,
            logprobs=0 if sampling.log_probs else None,  # only of the sampled token
            logprobs_mode=LogprobMode.PROCESSED,  # of the sampling distribution
            detokenize=False,
            add_special_tokens=False,
        )

    def submit(self, ids: Sequence[int], params: SamplingParams) -> Any:
        return self._llm.generate_async(list(ids), sampling_params=params)

    async def completion(self, handle: Any) -> Completion:
        output = (await handle).outputs[0]
        # Drop the tokens of an aborted request, because they may differ from the sampled tokens.
        if output.finish_reason not in ("stop", "length"):
            return Completion(token_ids=[], finish="cut", log_probs=[])
        # TensorRT-LLM reports numbers, or objects with the attribute logprob.
        reported = [{token: getattr(x, "logprob", x) for token, x in entry.items()} for entry in output.logprobs or []]
        return Completion.of(output.token_ids, output.finish_reason, reported)

    def abort(self, handle: Any) -> None:
        handle.abort()

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        results: list[Any] = await self._llm.collective_rpc(method, args=args)
        return results

    async def sleep(self) -> None:
        # Otherwise the prefix cache would still refer to the released blocks.
        await self.call_workers("brorl_reset_prefix_cache")
        await self._llm.release(self.tags)

    async def wake(self) -> None:
        await self._llm.resume([tag for tag in self.tags if tag != _KV_CACHE])

    async def wake_caches(self) -> None:
        await self._llm.resume([_KV_CACHE])
