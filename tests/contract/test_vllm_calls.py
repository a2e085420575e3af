"""Check all calls into vLLM against the recorded signatures of its release for GPUs."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from types import ModuleType

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
def given(tmp_path, monkeypatch):
    """Yield the arguments that VllmBackend would pass to vLLM on a GPU; vLLM itself is replaced by empty modules."""
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
        section=dataclasses.asdict(EngineConfig(max_num_tokens=4096, kv_dtype="fp8")),
    )
    yield importlib.import_module(f"{OURS}.llm").VllmBackend(options).arguments()
    del sys.modules[f"{OURS}.llm"]


@pytest.mark.parametrize("free", [1, 4, 20, 60, 79])
def test_engine_starts_next_to_a_trainer(free, given):
    """vLLM 0.33 needs the fraction gpu_memory_utilization of the GPU's memory to be free at start, even if the size of
    the KV cache is given (request_memory in v1/worker/utils.py)."""
    assert given["kv_cache_memory_bytes"] > 0
    assert (given["max_num_batched_tokens"], given["kv_cache_dtype"]) == (4096, "fp8")
    share = given.get("gpu_memory_utilization", LISTING.defaults["gpu_memory_utilization"])
    assert 0 < share <= 1  # the bounds of its field
    assert free * GIB >= 80 * GIB * share
