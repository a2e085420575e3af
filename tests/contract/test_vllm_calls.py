"""Check all calls into vLLM against the recorded signatures of its release for GPUs."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from contract.listing import Listing, keys_of, problems

import megatron_brorl
from megatron_brorl.config.schema import EngineConfig
from megatron_brorl.rollout.remote.protocol import EngineOptions

LEAF = Path(megatron_brorl.__file__).parent / "rollout" / "remote" / "vllm"
LISTING = Listing("vllm_0_33")
OURS = "megatron_brorl.rollout.remote.vllm"
GIB = 2**30


def source(name: str) -> str:
    return (LEAF / name).read_text(encoding="utf-8")


def test_calls_of_the_backend_match_the_release():
    wrong, seen = problems(source("llm.py"), "vllm", LISTING, {"self._llm": "AsyncLLM"})
    assert wrong == []
    methods = ("from_engine_args", "generate", "abort", "collective_rpc", "is_paused", "reset_prefix_cache")
    expected = {f"AsyncLLM.{name}" for name in (*methods, "sleep", "wake_up")}
    assert seen == {*expected, "AsyncEngineArgs", "SamplingParams", "TokensPrompt"}
    given = keys_of(source("llm.py"), "arguments")
    assert len(given) >= 20
    assert LISTING.refusal("AsyncEngineArgs", 0, sorted(given)) == ""


def test_calls_of_the_worker_extension_match_the_release():
    holders = {"method": "UnquantizedEmbeddingMethod"}
    wrong, seen = problems(source("extension.py"), "vllm", LISTING, holders)
    assert wrong == []
    assert seen == {
        *("set_current_vllm_config", "initialize_layerwise_reload", "finalize_layerwise_reload"),
        "UnquantizedEmbeddingMethod.process_weights_after_loading",
    }


@pytest.fixture
def backend(tmp_path, monkeypatch):
    """Yield a VllmBackend as on a GPU; vLLM itself is replaced by empty modules."""
    names = {
        "vllm": ("SamplingParams", "TokensPrompt", "__version__"),
        "vllm.engine": (),
        "vllm.engine.arg_utils": ("AsyncEngineArgs",),
        "vllm.sampling_params": ("RequestOutputKind",),
        "vllm.v1": (),
        "vllm.v1.engine": (),
        "vllm.v1.engine.async_llm": ("AsyncLLM",),
        "vllm.v1.engine.exceptions": ("EngineDeadError",),
    }
    for name, held in names.items():
        module = ModuleType(name)
        vars(module).update(dict.fromkeys(held, ""))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    tiny.make_model(tmp_path / "model", "qwen2", False, 0)
    options = EngineOptions(
        engine="vllm",
        model=str(tmp_path / "model"),
        vocab=304,
        context=200,
        dtype="float32",
        max_rows=2048,
        stop_ids=(2,),
        max_kv_tokens=4000,
        routes=True,
        section=dataclasses.asdict(EngineConfig(max_num_tokens=4096, kv_dtype="fp8")),
    )
    yield importlib.import_module(f"{OURS}.llm").VllmBackend(options)
    del sys.modules[f"{OURS}.llm"]


@pytest.mark.parametrize("free", [1, 4, 20, 60, 79])
def test_engine_starts_next_to_a_trainer(free, backend):
    """vLLM 0.33 needs the fraction gpu_memory_utilization of the GPU's memory to be free at start, even if the size of
    the KV cache is given (request_memory in v1/worker/utils.py)."""
    given = backend.arguments()
    assert given["kv_cache_memory_bytes"] > 0
    assert (given["max_num_batched_tokens"], given["kv_cache_dtype"]) == (4096, "fp8")
    assert given["hf_overrides"] == {"head_dtype": "float32"}
    assert given["sleep_mode_offload_cudagraph"]
    assert given["compilation_config"]["cudagraph_capture_sizes"][-1] == 2048  # By default, graphs end at 512 rows.
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    share = given.get("gpu_memory_utilization", LISTING.defaults["gpu_memory_utilization"])
    assert 0 < share <= 1  # the bounds of its field
    assert free * GIB >= 80 * GIB * share


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_routes_are_returned(dtype, backend):
    """vLLM returns uint16 for more than 256 experts (RoutedExpertsCapturer)."""
    routes = np.arange(240, 264).reshape(4, 3, 2).astype(dtype)

    async def generate(*_):
        drawn = SimpleNamespace(token_ids=[5, 2], finish_reason="stop", routed_experts=routes)
        yield SimpleNamespace(outputs=[drawn])

    backend._llm = SimpleNamespace(generate=generate)
    vars(sys.modules[f"{OURS}.llm"])["TokensPrompt"] = dict
    done = asyncio.run(backend._complete("0", [7, 8, 9], SimpleNamespace(logprobs=None)))
    assert done.routes.tolist() == routes.tolist()
    assert done.routes.dtype == {"uint8": torch.uint8, "uint16": torch.int16}[dtype]
    assert backend.arguments()["enable_return_routed_experts"]


def test_routes_are_refused_on_a_cpu(backend, monkeypatch):
    """vLLM records them only with Triton (_verify_aux_output_compatibility in config/vllm.py)."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"^rollout\.replay_routes: .* set 'never'$"):
        type(backend)(backend.options)
