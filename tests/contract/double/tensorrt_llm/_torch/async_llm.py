"""AsyncLLM with its workers in this process."""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_brorl.types import Rollout
from tensorrt_llm._double import fault_point
from tensorrt_llm._ray_utils import control_action_decorator
from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor, Row
from tensorrt_llm.llmapi.llm_args import ExecutorMemoryType, RayPlacementConfig, TorchLlmArgs


class RayGPUWorker:
    """One GPU of the engine."""

    def __init__(self, device_id: int, args: Any) -> None:
        self.device_id, self.llm_args = device_id, args
        self.engine = PyExecutor(args)

    @control_action_decorator
    def sleep(self, sleep_tags: list[str]) -> None:
        fault_point("sleep")
        tags = self._verify(sleep_tags)
        self.engine.release(tags)
        modes = self.llm_args.sleep_config.restore_modes
        lost = {tag for tag in tags if modes.get(tag) == "NONE"}
        if "model_weights" in lost:
            self.engine.model_engine.model.drop()
        self.engine.lost |= lost - {"kv_cache", "model_weights", "draft_model_weights"}

    @control_action_decorator
    def wakeup(self, wakeup_tags: list[str]) -> None:
        tags = self._verify(wakeup_tags)
        if not tags <= self.engine.asleep:
            raise ValueError(f"{tags - self.engine.asleep} are not asleep")
        self.engine.asleep -= tags

    def _verify(self, tags: list[str]) -> set[str]:
        if self.llm_args.sleep_config is None:
            raise ValueError("sleep is not enabled")
        return {str(ExecutorMemoryType(tag).value) for tag in tags}  # raises ValueError for an unknown tag


def _inject(extension: str | None) -> Any:
    """Return RayGPUWorker with the extension as a base class. Raises ValueError for a name that both have."""
    if not extension:
        return RayGPUWorker
    module, _, name = extension.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    for attribute in dir(cls):
        if not attribute.startswith("__") and hasattr(RayGPUWorker, attribute):
            raise ValueError(f"Worker class already defines '{attribute}', which conflicts with extension {name}.")
    return type(f"RayGPUWorkerWith{name}", (RayGPUWorker, cls), {})


@dataclass
class CompletionOutput:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None


class RequestOutput:
    """The awaitable result of a request; outputs[0] is filled when it is finished."""

    def __init__(self, ids: list[int], params: Any) -> None:
        self.outputs = [CompletionOutput()]
        self._params = params
        self._loop = asyncio.get_running_loop()
        self._done = asyncio.Event()
        self.row = Row(ids, params, self._take)

    def _take(self, rollout: Rollout | None, reported: list[Any]) -> None:
        self._loop.call_soon_threadsafe(self._finish, rollout, reported)

    def _finish(self, rollout: Rollout | None, reported: list[Any]) -> None:
        out, params = self.outputs[0], self._params
        if rollout is None:
            out.finish_reason = "cancelled"
        else:
            out.finish_reason = rollout.finish
            out.token_ids = rollout.token_ids.tolist()
            out.logprobs = reported if any(reported) else []
            ends_with_eos = out.token_ids[-1:] == [params.end_id]
            if rollout.finish == "stop" and not ends_with_eos and not params.include_stop_str_in_output:
                out.token_ids = out.token_ids[:-1]
        self._done.set()

    def abort(self) -> None:
        self.row.aborted = True

    async def aresult(self) -> RequestOutput:
        await self._done.wait()
        return self

    def __await__(self) -> Generator[Any, Any, RequestOutput]:
        return self.aresult().__await__()


class AsyncLLM:
    """The methods of tensorrt_llm._torch.async_llm.AsyncLLM that our backend uses."""

    def __init__(
        self,
        placement_groups: Any = None,
        placement_bundle_indices: Any = None,
        per_worker_gpu_share: float | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        kwargs["orchestrator_type"] = "ray"
        kwargs["allreduce_strategy"] = "NCCL"
        kwargs["ray_placement_config"] = RayPlacementConfig(
            defer_workers_init=True,
            placement_groups=placement_groups,
            placement_bundle_indices=placement_bundle_indices,
            per_worker_gpu_share=per_worker_gpu_share,
        )
        kwargs.setdefault("ray_worker_extension_cls", "tensorrt_llm.llmapi.rlhf_utils.WorkerExtension")
        self.args = TorchLlmArgs(*args, **kwargs)
        self._workers: list[Any] = []
        self._compared = False  # whether the workers' weights were compared

    def __await__(self) -> Generator[Any, Any, AsyncLLM]:
        return self.setup_async().__await__()

    async def setup_async(self) -> AsyncLLM:
        host, port = os.environ["RAY_ADDRESS"].split(":")  # like ray.init(address="auto") with a running Ray
        socket.create_connection((host, int(port))).close()
        worker_class = _inject(self.args.ray_worker_extension_cls)
        self._workers = [worker_class(i, self.args) for i in range(self.args.tensor_parallel_size)]
        return self

    def generate_async(self, inputs: Any, sampling_params: Any = None) -> RequestOutput:
        params = sampling_params
        longest = min(x for x in (self.args.max_input_len, self.args.max_seq_len) if x)
        if not inputs or len(inputs) > longest or len(inputs) + params.max_tokens > self.args.max_seq_len:
            raise ValueError(f"a prompt of {len(inputs)} tokens with max_tokens {params.max_tokens} does not fit")
        output = RequestOutput(list(inputs), params)
        self._compare_workers()
        self._workers[0].engine.submit(output.row)
        return output

    def _compare_workers(self) -> None:
        if self._compared:
            return
        models = [worker.engine.model_engine.model.tensors for worker in self._workers]
        for name, tensor in models[0].items():
            if not all(torch.equal(tensor, other[name]) for other in models[1:]):
                raise SystemError(f"{name} differs between workers")
        self._compared = True

    async def release(self, tags: list[str]) -> None:
        await self.collective_rpc("sleep", args=(tags,))

    async def resume(self, tags: list[str]) -> None:
        await self.collective_rpc("wakeup", args=(tags,))

    async def update_weights(self, weights: dict[str, str] | None) -> None:
        await self.collective_rpc("update_weights", args=(weights,))

    async def collective_rpc(
        self,
        method: str,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        unique_reply_rank: int | None = None,
        target_ranks: Any = None,
    ) -> list[Any]:
        self._compared = False
        calls = [getattr(worker, method) for worker in self._workers]
        return [await asyncio.to_thread(call, *args, **(kwargs or {})) for call in calls]
