"""Compare arguments that only a GPU needs, and the fake tensorrt_llm, with recorded signatures of releases.

A listing is recorded from the files of the release, with source and date. A record of our code would confirm its own
mistakes. tests/real_vllm passes the other arguments to the real vLLM, and test_trtllm_engine.py those of TensorRT-LLM
to the fake package.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import inspect
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from contract.engines import DOUBLE

from megatron_brorl.config.schema import EngineConfig
from megatron_brorl.rollout.remote.protocol import EngineOptions

LISTINGS = Path(__file__).parent / "listings"
TRTLLM, VLLM = (json.loads((LISTINGS / f"{name}.json").read_text()) for name in ("tensorrt_llm_1_3", "vllm_0_33"))
OURS = "megatron_brorl.rollout.remote.vllm"
GIB = 2**30
KIND = inspect.Parameter.POSITIONAL_OR_KEYWORD


def forget_fake() -> None:
    for name in [m for m in sys.modules if m.partition(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


@pytest.fixture
def importable(monkeypatch):
    """Make the fake package importable as tensorrt_llm."""
    monkeypatch.syspath_prepend(str(DOUBLE))
    forget_fake()
    yield
    forget_fake()


@pytest.mark.usefixtures("importable")
def test_fake_package_matches_the_release():
    for module, names in TRTLLM["modules"].items():
        fake = importlib.import_module(module)
        assert [n for n in names if not hasattr(fake, n)] == []
    for name, members in TRTLLM["members"].items():
        modules = [m for m, names in TRTLLM["modules"].items() if name in names]
        enumeration = getattr(importlib.import_module(modules[0]), name)
        assert [x.name for x in enumeration] == list(members)

    # Check the functions. The classes accept exactly the recorded arguments by construction.
    from tensorrt_llm import AsyncLLM
    from tensorrt_llm._torch.utils import get_device_uuid
    from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension

    functions = {"get_device_uuid": get_device_uuid, "WorkerExtension.update_weights": WorkerExtension.update_weights}
    functions |= {n: getattr(AsyncLLM, n.split(".")[1]) for n in TRTLLM["signatures"] if n.startswith("AsyncLLM.")}
    for name, function in functions.items():
        parameters = [p for p in inspect.signature(function).parameters if p != "self"]
        assert parameters == TRTLLM["signatures"][name], name


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
    for name, members in names.items():
        module = ModuleType(name)
        vars(module).update(dict.fromkeys(members, ""))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    tiny.make_model(tmp_path / "model", "qwen2", tied=False)
    sizes = {"vocab": 304, "context": 200, "max_rows": 2048, "max_kv_tokens": 4000}
    section = dataclasses.asdict(EngineConfig(kv_dtype="fp8"))
    model = str(tmp_path / "model")
    options = EngineOptions("vllm", model, dtype="float32", stop_ids=(2,), routes=True, section=section, **sizes)
    yield importlib.import_module(f"{OURS}.llm").VllmBackend(options)
    del sys.modules[f"{OURS}.llm"]


@pytest.mark.parametrize("free", [1, 79])  # GiB of the GPU's 80
def test_engine_starts_next_to_a_trainer(free, backend):
    """vLLM 0.33 needs the fraction gpu_memory_utilization of the GPU's memory to be free at start, even if the size of
    the KV cache is given (request_memory in v1/worker/utils.py)."""
    arguments = backend.arguments()
    assert arguments.keys() <= set(VLLM["signatures"]["AsyncEngineArgs"])
    assert arguments["kv_cache_memory_bytes"] > 0
    assert (arguments["max_num_batched_tokens"], arguments["kv_cache_dtype"]) == (8192, "fp8")
    assert arguments["hf_overrides"] == {"head_dtype": "float32"}
    assert arguments["sleep_mode_offload_cudagraph"]
    assert arguments["compilation_config"]["cudagraph_capture_sizes"][-1] == 2048  # By default, graphs end at 512 rows.
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    share = arguments["gpu_memory_utilization"]
    assert 0 < share <= 1  # the bounds of its field
    assert free * GIB >= 80 * GIB * share


def test_sleep_and_wake_have_the_arguments_of_the_release(backend):
    calls = []

    def recorded(name):
        parameters = [inspect.Parameter(p, KIND) for p in VLLM["signatures"][f"AsyncLLM.{name}"]]

        async def call(*arguments):
            inspect.Signature(parameters).bind_partial(*arguments)
            calls.append((name, *arguments))

        return call

    async def reset():
        return True

    backend._llm = SimpleNamespace(sleep=recorded("sleep"), wake_up=recorded("wake_up"), reset_prefix_cache=reset)
    for change in (backend.sleep, backend.wake, backend.wake_caches):
        asyncio.run(change())
    assert calls == [("sleep", 2), ("wake_up", ["weights"]), ("wake_up", ["kv_cache"])]


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_routes_are_returned(dtype, backend):
    """vLLM returns uint16 for more than 256 experts (RoutedExpertsCapturer)."""
    routes = np.arange(240, 264).reshape(4, 3, 2).astype(dtype)  # as uint16 also above 255, as uint8 wrapped

    async def generate(*_):
        completion = SimpleNamespace(token_ids=[5, 2], finish_reason="stop", routed_experts=routes)
        yield SimpleNamespace(outputs=[completion])

    backend._llm = SimpleNamespace(generate=generate)
    vars(sys.modules[f"{OURS}.llm"])["TokensPrompt"] = dict
    completion = asyncio.run(backend._complete("0", [7, 8, 9], SimpleNamespace(logprobs=None)))
    assert completion.routes.tolist() == routes.tolist()
    assert completion.routes.dtype == {"uint8": torch.uint8, "uint16": torch.int16}[dtype]
    assert backend.arguments()["enable_return_routed_experts"]


def test_routes_are_refused_on_a_cpu(backend, monkeypatch):
    """vLLM records them only with Triton (_verify_aux_output_compatibility in config/vllm.py)."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"^rollout\.replay_routes: .* set 'never'$"):
        type(backend)(backend.options)
