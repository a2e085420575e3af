"""TensorRT-LLM's AsyncLLM as the engine process uses it, from 1.3.0rc21 on.

With extension.py the only file that imports tensorrt_llm. Not yet run on a GPU; tests run it on the contract double.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import tensorrt_llm
import torch
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
from megatron_brorl.rollout.remote import seeds
from megatron_brorl.rollout.remote.options import Capabilities, EngineOptions, WorkerBucket
from megatron_brorl.rollout.remote.protocol import Completion, EngineLeaf
from megatron_brorl.rollout.remote.trtllm import ray_node
from megatron_brorl.rollout.remote.trtllm.settings import (
    KV_CACHE,
    graph_sizes,
    restore_modes,
    rows_at_a_time,
    sleep_tags,
)

EXTENSION = "megatron_brorl.rollout.remote.trtllm.extension.BrorlExtension"
# Quantised with the scales of each 128 x 128 block, from whatever full weights come (rollout.remote.fp8_blocks).
_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
_IF_REPEATING = {  # by what decides which tokens are drawn
    "request": "it takes a seed per rollout, and two of them agree",
    "generator": "install a TensorRT-LLM that takes a seed per request (August 2026)",
}


class Llm(EngineLeaf):
    """TensorRT-LLM's leaf."""

    def __init__(self, options: EngineOptions) -> None:
        """Raises ValueError where this version of TensorRT-LLM cannot do what is asked."""
        self.options, self.config = options, EngineConfig(**options.section)
        self.tags = sleep_tags(str(tag.value) for tag in ExecutorMemoryType)

        # Tables of log-probs and CUDA graphs are of this size: no larger than what can run together.
        c = self.config
        self.rows = options.max_rows
        if options.max_kv_tokens:
            self.rows = rows_at_a_time(options.max_kv_tokens, options.context, options.max_rows)

        self.ray = ray_node.start(c.tensor)
        self._llm = self._build()

    def _build(self) -> Any:
        o, c = self.options, self.config

        # What training needs is set here; the rest is left to the engine. sampler_type is left out: it was removed in
        # August 2026, and TorchSampler is the default before.
        return AsyncLLM(
            model=o.model,
            skip_tokenizer_init=True,  # ids in, ids out
            tensor_parallel_size=c.tensor,
            dtype=o.dtype,
            load_format="dummy",  # weights come from the trainer
            model_kwargs={"quantization_config": _FP8} if c.quantization == "fp8" else None,
            max_batch_size=self.rows,
            # Neither a prompt nor a rollout that goes on may be cut short of the context.
            max_input_len=o.context,
            max_seq_len=o.context,
            max_num_tokens=max(c.max_num_tokens, o.context),
            # Siblings find the blocks of their prompt by its prefix. The smaller of both bounds holds: what the trainer
            # will still take before its first update is not taken by caches now, nor after a restart.
            kv_cache_config=KvCacheConfig(
                enable_block_reuse=True,
                free_gpu_memory_fraction=c.memory_fraction,
                max_tokens=o.max_kv_tokens or None,
                dtype=c.kv_dtype,
                # The second manager, which "auto" may choose, tells bytes and no number of blocks (brorl_kv_tokens).
                use_kv_cache_manager_v2=False,
            ),
            # The other policy, MAX_UTILIZATION, evicts and recomputes requests, which cost 40% of the throughput where
            # many more were asked for than fit (TensorRT-LLM issue 16827).
            scheduler_config=SchedulerConfig(capacity_scheduler_policy=CapacitySchedulerPolicy.GUARANTEED_NO_EVICT),
            # A graph is of one batch size: without padding all but the sizes of the list would run without one.
            cuda_graph_config=(
                CudaGraphConfig(batch_sizes=graph_sizes(self.rows), enable_padding=True) if c.cuda_graphs else None
            ),
            sleep_config=SleepConfig(
                restore_modes={ExecutorMemoryType(tag): mode for tag, mode in restore_modes(self.tags).items()}
            ),
            ray_worker_extension_cls=EXTENSION,  # the brorl_ calls, in every worker
        )

    async def start(self) -> Capabilities:
        """See EngineLeaf."""
        await self._llm
        await self._check_log_probs()
        kind = await self._find_seeds()
        tokens = min(await self._llm.collective_rpc("brorl_kv_tokens"))
        rows = rows_at_a_time(tokens, self.options.context, self.rows)
        return Capabilities(
            engine=f"TensorRT-LLM {tensorrt_llm.__version__}",
            torch=torch.__version__,
            seeds=kind,
            keeps_cut=False,  # nothing proves that they are what was drawn
            log_probs="processed",
            if_repeating=_IF_REPEATING[kind],
            devices=tuple(await self._llm.collective_rpc("brorl_device")),
            kv_tokens=tokens,
            rows=rows,
            details={"tags": self.tags},  # of sleep and wake
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
    ) -> SamplingParams:
        """See EngineLeaf; stop strings are refused with the configuration.

        All settings are explicit: left out, they would mean greedy.
        """
        stop = list(self.options.stop_ids)
        return SamplingParams(
            end_id=stop[0],
            pad_id=stop[0],
            max_tokens=tokens,
            stop_token_ids=stop,
            include_stop_str_in_output=True,  # so that the stop token stays, with its log-prob
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            logprobs=0 if log_probs else None,  # of the sampled token alone
            logprobs_mode=LogprobMode.PROCESSED,  # of the distribution that tokens are drawn from
            detokenize=False,
            add_special_tokens=False,
        )

    def submit(self, ids: Sequence[int], params: SamplingParams) -> Any:
        """See EngineLeaf."""
        return self._llm.generate_async(list(ids), sampling_params=params)

    async def completion(self, handle: Any) -> Completion:
        """See EngineLeaf."""
        output = (await handle).outputs[0]
        reported = [{k: getattr(v, "logprob", v) for k, v in entry.items()} for entry in output.logprobs or []]
        return Completion.of(output.token_ids, output.finish_reason, reported)

    def abort(self, handle: Any) -> None:
        """See EngineLeaf."""
        handle.abort()

    async def begin(self) -> None:
        """See EngineLeaf."""
        await self._llm.collective_rpc("brorl_begin")

    async def load(self, bucket: WorkerBucket) -> None:
        """See EngineLeaf."""
        await self._llm.collective_rpc("brorl_load", args=(bucket,))

    async def finish(self, names: Sequence[str]) -> None:
        """See EngineLeaf."""
        await self._llm.collective_rpc("brorl_finish", args=(list(names),))

    async def sleep(self) -> None:
        """See EngineLeaf."""
        # Released blocks would still be found by their prefix.
        await self._llm.collective_rpc("brorl_reset_prefix_cache")
        await self._llm.release(self.tags)

    async def wake(self) -> None:
        """See EngineLeaf."""
        await self._llm.resume([tag for tag in self.tags if tag != KV_CACHE])

    async def wake_caches(self) -> None:
        """See EngineLeaf."""
        await self._llm.resume([KV_CACHE])

    async def reseed(self, seed: int) -> None:
        """See EngineLeaf."""
        await self._llm.collective_rpc("brorl_reseed", args=(seed,))

    async def _check_log_probs(self) -> None:
        """Raises ValueError unless the log-prob of every sampled token is reported."""
        drawn = await seeds.draw(self, 1)
        reported = [token for token, entry in zip(drawn.token_ids, drawn.reported, strict=False) if token in entry]
        if reported != drawn.token_ids:
            raise ValueError(f"TensorRT-LLM {tensorrt_llm.__version__} reports no log-probs of sampled tokens")

    async def _find_seeds(self) -> Literal["request", "generator"]:
        """What decides which tokens are drawn: a request's own seed, or that of the sampler's generator."""
        if await seeds.of_requests(self):
            return "request"

        drawn = []
        for seed in (3, 3, 4):
            await self.reseed(seed)
            drawn.append((await seeds.draw(self, 1)).token_ids)
        if drawn[0] == drawn[1] and drawn[0] != drawn[2]:
            return "generator"

        raise ValueError(f"TensorRT-LLM {tensorrt_llm.__version__} takes no seed: {seeds.REPEATED}")
