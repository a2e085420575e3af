"""TensorRT-LLM's AsyncLLM as the engine process uses it, in the forms of 1.2 and of 1.3.

With extension.py the only file that imports tensorrt_llm; examples and the container use 1.3. Not yet run on a GPU;
tests run it on the contract double.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import tensorrt_llm
import torch
from tensorrt_llm import AsyncLLM, SamplingParams
from tensorrt_llm._torch.virtual_memory import ExecutorMemoryType
from tensorrt_llm.llmapi import CapacitySchedulerPolicy, CudaGraphConfig, KvCacheConfig, SchedulerConfig, llm_args

from megatron_brorl.config.engine_keys import TrtLlmConfig
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
_SLEEP_CONFIG = hasattr(llm_args, "SleepConfig")  # 1.3; enable_sleep before
# Quantised with the scales of each 128 x 128 block, from whatever full weights come (rollout.remote.fp8_blocks).
_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


class Llm(EngineLeaf):
    """TensorRT-LLM's leaf."""

    def __init__(self, options: EngineOptions) -> None:
        """Raises ValueError where this version of TensorRT-LLM cannot do what is asked."""
        self.options, self.config = options, TrtLlmConfig(**options.section)

        # TorchSampler of 1.2 ignores seeds; 1.3 has no TRTLLMSampler any more.
        automatic = "TorchSampler" if _SLEEP_CONFIG else "TRTLLMSampler"
        self.sampler = automatic if self.config.sampler == "auto" else self.config.sampler

        # FP8 weights can be replaced in 1.3, and in 1.2 where no graph was captured.
        self.fp8_refit = _SLEEP_CONFIG or not self.config.cuda_graphs
        if self.config.quantization == "fp8_block" and not self.fp8_refit:
            raise ValueError(
                f"TensorRT-LLM {tensorrt_llm.__version__} cannot take FP8 weights under CUDA graphs: set "
                "trtllm.cuda_graphs = false or trtllm.quantization = 'none'"
            )

        # Requests that are thrown out under the overlap scheduler come back with a token too many for TRTLLMSampler,
        # which asserts (TensorRT-LLM pull request 10943).
        c = self.config
        if c.scheduler == "MAX_UTILIZATION" and c.overlap and self.sampler == "TRTLLMSampler":
            raise ValueError(
                "trtllm.scheduler = 'MAX_UTILIZATION' crashes under TRTLLMSampler and the overlap scheduler: set "
                "trtllm.overlap = false, or trtllm.scheduler = 'GUARANTEED_NO_EVICT'"
            )

        # Names that changed between the generations.
        self.tags = sleep_tags(str(tag.value) for tag in ExecutorMemoryType)
        # The enumeration of SamplingParams.logprobs_mode, where there is one.
        modes: list[Any] = [type(f.default) for f in dataclasses.fields(SamplingParams) if f.name == "logprobs_mode"]
        self.mode = modes[0] if modes else None

        # Tables of log-probs and CUDA graphs are of this size: no larger than what can run together.
        self.rows = options.max_rows
        if options.max_kv_tokens:
            self.rows = rows_at_a_time(options.max_kv_tokens, options.context, options.max_rows, c.scheduler)

        self.log_probs_value = 0  # found out by `start`
        self.ray = ray_node.start(self.config.ray_port, self.config.tensor)
        self._llm = self._build()

    def _build(self) -> Any:
        o, c = self.options, self.config

        # What depends on the generation and on the configuration.
        extra: dict[str, Any] = {"enable_sleep": True}
        if _SLEEP_CONFIG:
            modes = {ExecutorMemoryType(tag): mode for tag, mode in restore_modes(self.tags).items()}
            extra = {"sleep_config": llm_args.SleepConfig(restore_modes=modes)}
        if c.quantization == "fp8_block":
            extra["model_kwargs"] = {"quantization_config": _FP8}

        # What training needs is set here; the rest is left to the engine.
        return AsyncLLM(
            model=o.model,
            skip_tokenizer_init=True,  # ids in, ids out
            tensor_parallel_size=c.tensor,
            dtype=o.dtype,
            load_format="dummy",  # weights come from the trainer
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
            ),
            scheduler_config=SchedulerConfig(capacity_scheduler_policy=CapacitySchedulerPolicy(c.scheduler)),
            disable_overlap_scheduler=not c.overlap,
            # A graph is of one batch size: without padding all but the sizes of the list would run without one.
            cuda_graph_config=(
                CudaGraphConfig(batch_sizes=graph_sizes(self.rows), enable_padding=True) if c.cuda_graphs else None
            ),
            sampler_type=self.sampler,
            ray_worker_extension_cls=EXTENSION,  # the brorl_ calls, in every worker
            **extra,
        )

    async def start(self) -> Capabilities:
        """See EngineLeaf."""
        await self._llm
        value = await self._find_log_probs()
        kind = await self._find_seeds()
        tokens = min(await self._llm.collective_rpc("brorl_kv_tokens"))
        rows = rows_at_a_time(tokens, self.options.context, self.rows, self.config.scheduler)
        return Capabilities(
            engine=f"TensorRT-LLM {tensorrt_llm.__version__} with {self.sampler}",
            torch=torch.__version__,
            seeds=kind,
            keeps_cut=False,  # nothing proves that they are what was drawn
            log_probs="processed" if self.mode else "tempered" if self.sampler == "TRTLLMSampler" else "raw",
            if_repeating="choose another trtllm.sampler",
            devices=tuple(await self._llm.collective_rpc("brorl_device")),
            kv_tokens=tokens,
            rows=rows,
            details={
                "api": "1.3" if _SLEEP_CONFIG else "1.2",  # generation: sleep_config, or enable_sleep
                "sampler": self.sampler,
                "log_probs_value": value,  # SamplingParams.logprobs with which the sampled token's is among them
                "fp8_refit": self.fp8_refit,
                "tags": self.tags,  # of sleep and wake
            },
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
        value = max(self.log_probs_value, top_k if self.mode is None else 0)
        extra: dict[str, Any] = {"logprobs_mode": self.mode["PROCESSED"]} if self.mode else {}
        return SamplingParams(
            end_id=-1 if self.sampler == "TRTLLMSampler" else stop[0],
            pad_id=stop[0],
            max_tokens=tokens,
            stop_token_ids=stop,
            include_stop_str_in_output=True,  # so that the stop token stays, with its log-prob
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            logprobs=value if log_probs else None,
            detokenize=False,
            add_special_tokens=False,
            **extra,
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

    async def _find_log_probs(self) -> int:
        """The least SamplingParams.logprobs with which every sampled token's log-prob is reported."""
        for value in (0, 1):
            self.log_probs_value = value
            drawn = await seeds.draw(self, 1)
            if len(drawn.reported) == len(drawn.token_ids) and all(
                token in entry for token, entry in zip(drawn.token_ids, drawn.reported, strict=True)
            ):
                return value
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

        raise ValueError(
            f"TensorRT-LLM {tensorrt_llm.__version__} with {self.sampler} takes no seed: {seeds.REPEATED}; "
            "choose another trtllm.sampler"
        )
