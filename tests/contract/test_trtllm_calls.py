"""Every call into tensorrt_llm, read from the source and checked against what is recorded of its releases, as is the
double, which has the same signatures and refuses the same."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from contract.engines import DOUBLE
from contract.listing import Listing, problems

import megatron_brorl

LEAF = Path(megatron_brorl.__file__).parent / "rollout" / "remote" / "trtllm"
LISTING = Listing("tensorrt_llm_1_3")
HOLDERS = {"llm.py": {"self._llm": "AsyncLLM"}, "extension.py": {"self": "WorkerExtension"}}


def _forget() -> None:
    for name in [m for m in sys.modules if m.partition(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


@pytest.fixture
def importable(monkeypatch) -> Iterator[None]:
    """The double is importable as tensorrt_llm."""
    monkeypatch.syspath_prepend(str(DOUBLE))
    _forget()
    yield
    _forget()


def test_every_call_of_the_process_fits():
    source = (LEAF / "llm.py").read_text(encoding="utf-8")
    wrong, seen = problems(source, "tensorrt_llm", LISTING, HOLDERS["llm.py"])
    assert wrong == []
    assert seen == {
        *("AsyncLLM", "SamplingParams", "KvCacheConfig", "SchedulerConfig", "CudaGraphConfig", "SleepConfig"),
        *(f"AsyncLLM.{name}" for name in ("generate_async", "collective_rpc", "release", "resume")),
    }


def test_every_call_of_the_workers_fits():
    source = (LEAF / "extension.py").read_text(encoding="utf-8")
    wrong, seen = problems(source, "tensorrt_llm", LISTING, HOLDERS["extension.py"])
    assert wrong == []
    assert seen == {"get_device_uuid", "WorkerExtension.update_weights"}


def test_the_check_sees_what_older_versions_had():
    """What was removed or moved before 1.3.0rc21, or is not in all releases from there on."""
    text = """
from tensorrt_llm import AsyncLLM
from tensorrt_llm._torch.virtual_memory import ExecutorMemoryType
from tensorrt_llm.llmapi.llm_args import KvCacheConfig
AsyncLLM(model="", sampler_type="TorchSampler", enable_sleep=True, dtype="auto")
KvCacheConfig(enable_blok_reuse=True)
self._llm.release(["model"], 1)
"""
    wrong, _ = problems(text, "tensorrt_llm", LISTING, HOLDERS["llm.py"])
    assert sorted(wrong) == [
        "AsyncLLM has no argument sampler_type, enable_sleep",
        "AsyncLLM.release takes 1 arguments in order, not 2",
        "KvCacheConfig has no argument enable_blok_reuse",
        "tensorrt_llm._torch.virtual_memory has no ExecutorMemoryType",
    ]


@pytest.mark.usefixtures("importable")
def test_the_double_has_what_is_recorded():
    for module, names in LISTING.modules.items():
        found = importlib.import_module(module)
        assert [n for n in names if not hasattr(found, n)] == []
    for name, members in LISTING.members.items():
        modules = [m for m, names in LISTING.modules.items() if name in names]
        enumeration = getattr(importlib.import_module(modules[0]), name)
        assert [x.name for x in enumeration] == list(members)

    # Its functions; its classes take the recorded arguments by construction.
    from tensorrt_llm import AsyncLLM
    from tensorrt_llm._torch.utils import get_device_uuid
    from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension

    functions = {"get_device_uuid": get_device_uuid, "WorkerExtension.update_weights": WorkerExtension.update_weights}
    functions |= {n: getattr(AsyncLLM, n.split(".")[1]) for n in LISTING.signatures if n.startswith("AsyncLLM.")}
    for name, function in functions.items():
        parameters = [p for p in inspect.signature(function).parameters if p != "self"]
        assert parameters == LISTING.signatures[name], name


@pytest.mark.usefixtures("importable")
def test_the_double_is_as_strict_as_the_engine(tmp_path):
    """What TensorRT-LLM refuses, the double refuses: unknown arguments, foreign tags, greedy with n > 1, settings that
    contradict one another."""
    from tensorrt_llm import AsyncLLM, SamplingParams
    from tensorrt_llm.llmapi.llm_args import CudaGraphConfig, KvCacheConfig, SleepConfig

    for unknown in ("max_batchsize", "enable_sleep", "sampler_type"):
        with pytest.raises(ValueError, match=unknown):
            AsyncLLM(model=str(tmp_path), **{unknown: None})
    with pytest.raises(TypeError, match="top"):
        SamplingParams(end_id=1, top=3)
    with pytest.raises(ValueError, match="greedy"):
        SamplingParams(end_id=1, n=2)
    with pytest.raises(ValueError, match="max_batch_size is incompatible"):
        CudaGraphConfig(batch_sizes=[1, 8], max_batch_size=16)
    for wrong in ({"free_gpu_memory_fraction": 1.5}, {"max_tokens": 0}, {"use_kv_cache_manager_v2": "no"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            KvCacheConfig(**wrong)
    for modes in ({"weights": "NONE"}, {"model": "DISK"}):
        with pytest.raises(ValueError, match=r"weights|DISK"):
            SleepConfig(restore_modes=modes)
