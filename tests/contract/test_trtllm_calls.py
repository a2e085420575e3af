"""Every call into tensorrt_llm, read from the source and bound to the signatures of both generations."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from contract.engines import DOUBLE

import megatron_brorl

ROLLOUT = Path(megatron_brorl.__file__).parent / "rollout" / "remote" / "trtllm"
SOURCES = ["llm.py", "extension.py"]


def _forget() -> None:
    for name in [m for m in sys.modules if m.partition(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


@pytest.fixture(params=["1.2", "1.3"])
def api(request, monkeypatch) -> Iterator[str]:
    """tensorrt_llm is importable, as the generation asked for."""
    monkeypatch.syspath_prepend(str(DOUBLE))
    monkeypatch.setenv("BRORL_DOUBLE_API", request.param)
    _forget()
    yield request.param
    _forget()


def imported(tree: ast.Module) -> dict[str, Any]:
    """Objects of tensorrt_llm by the name that the source gives them; a missing one fails here."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "tensorrt_llm":
            module = importlib.import_module(node.module)
            for alias in node.names:
                try:
                    found[alias.asname or alias.name] = getattr(module, alias.name)
                except AttributeError:
                    found[alias.asname or alias.name] = importlib.import_module(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names if a.name.partition(".")[0] == "tensorrt_llm"]
            found |= {name: importlib.import_module(name) for name in names}
    return found


def target(function: ast.expr, names: dict[str, Any]) -> Any:
    """What a call calls, where that is tensorrt_llm's: an imported object, or a method of the engine or extension."""
    if isinstance(function, ast.Name):
        return names.get(function.id)
    if isinstance(function, ast.Attribute):
        holder = ast.unparse(function.value)
        if holder == "self._llm":
            return getattr(names["AsyncLLM"], function.attr)
        if holder == "self" and "WorkerExtension" in names and function.attr == "update_weights":
            return names["WorkerExtension"].update_weights
        if holder in names:
            return getattr(names[holder], function.attr, None)
    return None


def check(call: ast.Call, what: Any, names: dict[str, Any]) -> None:
    keywords = {k.arg: None for k in call.keywords if k.arg is not None}
    if what is names.get("AsyncLLM"):
        from tensorrt_llm.llmapi.llm_args import TorchLlmArgs

        known = {f.name for f in dataclasses.fields(TorchLlmArgs)} | set(inspect.signature(what.__init__).parameters)
        assert keywords.keys() <= known, keywords.keys() - known
        return
    method = inspect.isfunction(what) and "self" in inspect.signature(what).parameters
    inspect.signature(what).bind_partial(*([None] if method else []), *[None for _ in call.args], **keywords)


@pytest.mark.parametrize("source", SOURCES)
def test_every_call_fits_the_signatures(source, api):
    tree = ast.parse((ROLLOUT / source).read_text(encoding="utf-8"))
    names = imported(tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    checked = []
    for call in calls:
        if "SleepConfig" in ast.unparse(call.func) and api == "1.2":
            continue  # behind hasattr
        what = target(call.func, names)
        if callable(what):
            check(call, what, names)
            checked.append(ast.unparse(call.func))
    expected = {
        "llm.py": {
            *("AsyncLLM", "SamplingParams", "KvCacheConfig", "SchedulerConfig", "CudaGraphConfig"),
            *(f"self._llm.{name}" for name in ("generate_async", "collective_rpc", "release", "resume")),
        },
        "extension.py": {"get_device_uuid", "self.update_weights"},
    }
    assert expected[source] <= set(checked)


def test_the_check_sees_a_wrong_call(api):
    tree = ast.parse("from tensorrt_llm.llmapi import KvCacheConfig\nKvCacheConfig(enable_blok_reuse=True)")
    names = imported(tree)
    call = next(node for node in ast.walk(tree) if isinstance(node, ast.Call))
    with pytest.raises(TypeError, match="enable_blok_reuse"):
        check(call, target(call.func, names), names)


def test_the_double_is_as_strict_as_the_engine(api, tmp_path):
    """What TensorRT-LLM refuses, the double refuses: unknown arguments, foreign tags, greedy with n > 1, settings that
    contradict one another."""
    from tensorrt_llm import AsyncLLM, SamplingParams
    from tensorrt_llm._torch.virtual_memory import verify_sleep_wakeup_tags
    from tensorrt_llm.llmapi import CudaGraphConfig, KvCacheConfig, llm_args

    with pytest.raises(ValueError, match="max_batchsize"):
        AsyncLLM(model=str(tmp_path), max_batchsize=4)
    foreign = {"sleep_config": None} if api == "1.2" else {"enable_sleep": True}
    with pytest.raises(ValueError, match=next(iter(foreign))):
        AsyncLLM(model=str(tmp_path), **foreign)
    with pytest.raises(TypeError, match="top"):
        SamplingParams(end_id=1, top=3)
    with pytest.raises(ValueError, match="greedy"):
        SamplingParams(end_id=1, n=2)
    with pytest.raises(ValueError, match="max_batch_size is incompatible"):
        CudaGraphConfig(batch_sizes=[1, 8], max_batch_size=16)
    for wrong in ({"free_gpu_memory_fraction": 1.5}, {"max_tokens": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            KvCacheConfig(**wrong)
    if api == "1.3":
        for modes in ({"weights": "NONE"}, {"model": "DISK"}):
            with pytest.raises(ValueError, match=r"weights|DISK"):
                llm_args.SleepConfig(restore_modes=modes)
    if api == "1.2":
        with pytest.raises(ValueError, match="model_weights"):
            verify_sleep_wakeup_tags(["model_weights"])
    else:
        verify_sleep_wakeup_tags(["model_weights"])
        with pytest.raises(ValueError, match="TRTLLMSampler"):
            AsyncLLM(model=str(tmp_path), sampler_type="TRTLLMSampler")
