"""TensorRT-LLM's AsyncLLM as the engine process uses it, from 1.3.0rc29 on.

With extension.py the only file that imports tensorrt_llm. Not yet run on a GPU; tests run it on the contract double.
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
from megatron_brorl.rollout.remote.protocol import (
    Capabilities,
    Completion,
    EngineBackend,
    EngineOptions,
    check_sampling,
)
from megatron_brorl.rollout.remote.trtllm import ray_node
from megatron_brorl.rollout.remote.trtllm.settings import (
    KV_CACHE,
    graph_sizes,
    restore_modes,
    rows_at_a_time,
    sleep_tags,
)

EXTENSION = "megatron_brorl.rollout.remote.trtllm.extension.TrtllmWorkerExtension"
# Quantised with the scales of each 128 x 128 block, from whatever full weights come (weights_send.to_fp8_blocks).
_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


class TrtllmBackend(EngineBackend):
    """TensorRT-LLM's leaf."""

    def __init__(self, options: EngineOptions) -> None:
        """Raises ValueError where this version of TensorRT-LLM cannot do what is asked."""
        self.options = options
        self.config = EngineConfig(**options.section)
        self.tags = sleep_tags(str(tag.value) for tag in ExecutorMemoryType)

        # Tables of log-probs and CUDA graphs are of this size: no larger than what can run together.
        config = self.config
        self.rows = options.max_rows
        if options.max_kv_tokens:
            self.rows = rows_at_a_time(options.max_kv_tokens, options.context, options.max_rows)

        self.ray = ray_node.start(config.tensor)
        self._llm = self._build()

    def _build(self) -> Any:
        options = self.options
        config = self.config

        # What training needs is set here; the rest is left to the engine. sampler_type is left out: it was removed in
        # August 2026, and TorchSampler is the default before.
        return AsyncLLM(
            model=options.model,
            skip_tokenizer_init=True,  # ids in, ids out
            tensor_parallel_size=config.tensor,
            dtype=options.dtype,
            load_format="dummy",  # weights come from the trainer
            model_kwargs={"quantization_config": _FP8} if config.quantization == "fp8" else None,
            max_batch_size=self.rows,
            # Neither a prompt nor a rollout that goes on may be cut short of the context.
            max_input_len=options.context,
            max_seq_len=options.context,
            max_num_tokens=max(config.max_num_tokens, options.context),
            # Siblings find the blocks of their prompt by its prefix. The smaller of both bounds holds: what the trainer
            # will still take before its first update is not taken by caches now, nor after a restart.
            kv_cache_config=KvCacheConfig(
                enable_block_reuse=True,
                free_gpu_memory_fraction=config.memory_fraction,
                max_tokens=options.max_kv_tokens or None,
                dtype=config.kv_dtype,
                # The second manager, which "auto" may choose, tells bytes and no number of blocks (brorl_kv_tokens).
                use_kv_cache_manager_v2=False,
            ),
            # The other policy, MAX_UTILIZATION, evicts and recomputes requests, which cost 40% of the throughput where
            # many more were asked for than fit (TensorRT-LLM issue 16827).
            scheduler_config=SchedulerConfig(capacity_scheduler_policy=CapacitySchedulerPolicy.GUARANTEED_NO_EVICT),
            # A graph is of one batch size: without padding all but the sizes of the list would run without one.
            cuda_graph_config=(
                CudaGraphConfig(batch_sizes=graph_sizes(self.rows), enable_padding=True) if config.cuda_graphs else None
            ),
            sleep_config=SleepConfig(
                restore_modes={ExecutorMemoryType(tag): mode for tag, mode in restore_modes(self.tags).items()}
            ),
            ray_worker_extension_cls=EXTENSION,  # the brorl_ calls, in every worker
        )

    async def start(self) -> Capabilities:
        """See EngineBackend."""
        await self._llm
        name = f"TensorRT-LLM {tensorrt_llm.__version__}"
        await check_sampling(self, name)
        tokens = min(await self.call_workers("brorl_kv_tokens"))
        return Capabilities(
            engine=name,
            kv_tokens=tokens,
            rows=rows_at_a_time(tokens, self.options.context, self.rows),
        )

    def params(self, sampling: Sampling, tokens: int, seed: int) -> SamplingParams:
        """See EngineBackend; stop strings are refused with the configuration.

        All settings are explicit: left out, they would mean greedy.
        """
        stop = list(self.options.stop_ids)
        return SamplingParams(
            end_id=stop[0],
            pad_id=stop[0],
            max_tokens=tokens,
            stop_token_ids=stop,
            include_stop_str_in_output=True,  # so that the stop token stays, with its log-prob
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=seed,
            logprobs=0 if sampling.log_probs else None,  # of the sampled token only
            logprobs_mode=LogprobMode.PROCESSED,  # of the distribution that tokens are drawn from
            detokenize=False,
            add_special_tokens=False,
        )

    def submit(self, ids: Sequence[int], params: SamplingParams) -> Any:
        """See EngineBackend."""
        return self._llm.generate_async(list(ids), sampling_params=params)

    async def completion(self, handle: Any) -> Completion:
        """See EngineBackend."""
        output = (await handle).outputs[0]
        # An aborted request may report other tokens than the sampled ones, so its tokens are dropped.
        if output.finish_reason not in ("stop", "length"):
            return Completion([], "cut", [])
        reported = [{k: getattr(v, "logprob", v) for k, v in entry.items()} for entry in output.logprobs or []]
        return Completion.of(output.token_ids, output.finish_reason, reported)

    def abort(self, handle: Any) -> None:
        """See EngineBackend."""
        handle.abort()

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        """See EngineBackend."""
        found: list[Any] = await self._llm.collective_rpc(method, args=args)
        return found

    async def sleep(self) -> None:
        """See EngineBackend."""
        # Released blocks would still be found by their prefix.
        await self.call_workers("brorl_reset_prefix_cache")
        await self._llm.release(self.tags)

    async def wake(self) -> None:
        """See EngineBackend."""
        await self._llm.resume([tag for tag in self.tags if tag != KV_CACHE])

    async def wake_caches(self) -> None:
        """See EngineBackend."""
        await self._llm.resume([KV_CACHE])
