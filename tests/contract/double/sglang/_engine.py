"""Engine and the tokenizer manager behind it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from sglang._scheduler import Row, Scheduler
from sglang._settings import SamplingParams, ServerArgs
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    FlushCacheReqOutput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightsFromTensorReqInput,
)


class TokenizerManager:
    """What is asked of the scheduler by the event loop that first asked."""

    def __init__(self, args: ServerArgs, scheduler: Scheduler) -> None:
        self.server_args, self.scheduler = args, scheduler
        self.rid_to_state: dict[str, Row] = {}

    async def generate(self, ids: list[int], given: dict[str, Any], rid: str, log_probs: bool, top: int) -> Any:
        if rid in self.rid_to_state:
            raise ValueError(f"Duplicate request ID detected: {rid}")
        params = SamplingParams(**given)
        params.verify()
        longest = self.server_args.context_length or self.scheduler.tokens
        if len(ids) >= longest or len(ids) + (params.max_new_tokens or 0) > longest:
            raise ValueError(f"Requested token count exceeds the model's maximum context length of {longest} tokens")
        if len(ids) >= self.scheduler.longest - 5:
            raise ValueError(f"Input length ({len(ids)} tokens) exceeds the maximum allowed length")

        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        row = Row(rid, ids, params, log_probs, top, lambda: loop.call_soon_threadsafe(ended.set))
        self.rid_to_state[rid] = row
        self.scheduler.submit(row)
        await ended.wait()
        del self.rid_to_state[rid]

        meta: dict[str, Any] = {"id": rid, "finish_reason": row.finish, "completion_tokens": len(row.output_ids)}
        if log_probs:
            meta |= {"input_token_logprobs": [], "output_token_logprobs": row.drawn[: len(row.output_ids)]}
            meta |= {"output_top_logprobs": row.likeliest[: len(row.output_ids)]} if top else {}
        return {"output_ids": row.output_ids, "meta_info": meta}

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        if abort_all or rid in self.rid_to_state:
            for name, row in self.rid_to_state.items():
                row.aborted |= abort_all or name.startswith(rid)

    async def _ask(self, kind: type, work: Any, obj: Any) -> Any:
        if not isinstance(obj, kind):
            raise TypeError(f"{kind.__name__} expected, got {type(obj).__name__}")
        return await asyncio.to_thread(work, obj)

    async def begin_weight_update(self, obj: BeginWeightUpdateReqInput, request: Any = None) -> tuple[bool, str]:
        return await self._ask(BeginWeightUpdateReqInput, self.scheduler.begin, obj)

    async def end_weight_update(self, obj: EndWeightUpdateReqInput, request: Any = None) -> tuple[bool, str]:
        return await self._ask(EndWeightUpdateReqInput, self.scheduler.end, obj)

    async def update_weights_from_tensor(
        self, obj: UpdateWeightsFromTensorReqInput, request: Any = None
    ) -> tuple[bool, str]:
        return await self._ask(UpdateWeightsFromTensorReqInput, self.scheduler.update, obj)

    async def release_memory_occupation(self, obj: ReleaseMemoryOccupationReqInput, request: Any = None) -> None:
        await self._ask(ReleaseMemoryOccupationReqInput, self.scheduler.release, obj)

    async def resume_memory_occupation(self, obj: ResumeMemoryOccupationReqInput, request: Any = None) -> None:
        await self._ask(ResumeMemoryOccupationReqInput, self.scheduler.resume, obj)

    async def flush_cache(self, timeout_s: float | None = None) -> FlushCacheReqOutput:
        return FlushCacheReqOutput(success=await asyncio.to_thread(self.scheduler.flush))


class Engine:
    """Signatures of sglang.srt.entrypoints.engine.Engine. Its methods that run the loop are left out: ours runs."""

    def __init__(self, **kwargs: Any) -> None:
        self.server_args = ServerArgs(**kwargs)
        if not self.server_args.skip_tokenizer_init:
            raise NotImplementedError("the double has no tokenizer")
        scheduler = Scheduler(self.server_args)
        self.tokenizer_manager = TokenizerManager(self.server_args, scheduler)
        told = {"status": "ready", "max_total_num_tokens": scheduler.tokens, "max_req_input_len": scheduler.longest - 5}
        self._scheduler_init_result = SimpleNamespace(scheduler_infos=[told])
        self.loop = asyncio.get_running_loop()

    async def async_generate(
        self,
        prompt: Any = None,
        sampling_params: Any = None,
        input_ids: Any = None,
        image_data: Any = None,
        audio_data: Any = None,
        video_data: Any = None,
        mm_hashes: Any = None,
        mm_content_hashes: Any = None,
        return_logprob: Any = False,
        logprob_start_len: Any = None,
        top_logprobs_num: Any = None,
        token_ids_logprob: Any = None,
        lora_path: Any = None,
        custom_logit_processor: Any = None,
        require_reasoning: bool = False,
        return_hidden_states: Any = False,
        return_routed_experts: bool = False,
        routed_experts_start_len: int = 0,
        stream: bool = False,
        bootstrap_host: Any = None,
        bootstrap_port: Any = None,
        bootstrap_room: Any = None,
        routed_dp_rank: int | None = None,
        disagg_prefill_dp_rank: int | None = None,
        kv_hints: Any = None,
        data_parallel_rank: int | None = None,
        external_trace_header: Any = None,
        rid: Any = None,
        session_params: Any = None,
        priority: int | None = None,
        session_id: str | None = None,
        *,
        cache_salt: Any = None,
    ) -> Any:
        if prompt is not None or not input_ids or not all(isinstance(i, int) for i in input_ids):
            raise ValueError("The engine initialized with skip_tokenizer_init=True takes input_ids alone")
        if stream or logprob_start_len is not None or not isinstance(rid, str):
            raise NotImplementedError("not modelled")
        return await self.tokenizer_manager.generate(
            input_ids, sampling_params or {}, rid, bool(return_logprob), top_logprobs_num or 0
        )
