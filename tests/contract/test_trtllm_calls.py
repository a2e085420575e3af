"""Check all calls into tensorrt_llm, and the fake tensorrt_llm, against the recorded signatures of its releases."""

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
    """Make the fake package importable as tensorrt_llm."""
    monkeypatch.syspath_prepend(str(DOUBLE))
    _forget()
    yield
    _forget()


def test_calls_of_the_backend_match_the_release():
    source = (LEAF / "llm.py").read_text(encoding="utf-8")
    wrong, seen = problems(source, "tensorrt_llm", LISTING, HOLDERS["llm.py"])
    assert wrong == []
    assert seen == {
        *("AsyncLLM", "SamplingParams", "KvCacheConfig", "SchedulerConfig", "CudaGraphConfig", "SleepConfig"),
        *(f"AsyncLLM.{name}" for name in ("generate_async", "collective_rpc", "release", "resume")),
    }


def test_calls_of_the_worker_extension_match_the_release():
    source = (LEAF / "extension.py").read_text(encoding="utf-8")
    wrong, seen = problems(source, "tensorrt_llm", LISTING, HOLDERS["extension.py"])
    assert wrong == []
    assert seen == {"get_device_uuid", "WorkerExtension.update_weights"}


@pytest.mark.usefixtures("importable")
def test_fake_package_matches_the_release():
    for module, names in LISTING.modules.items():
        found = importlib.import_module(module)
        assert [n for n in names if not hasattr(found, n)] == []
    for name, members in LISTING.members.items():
        modules = [m for m, names in LISTING.modules.items() if name in names]
        enumeration = getattr(importlib.import_module(modules[0]), name)
        assert [x.name for x in enumeration] == list(members)

    # Check the functions. The classes accept exactly the recorded arguments by construction.
    from tensorrt_llm import AsyncLLM
    from tensorrt_llm._torch.utils import get_device_uuid
    from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension

    functions = {"get_device_uuid": get_device_uuid, "WorkerExtension.update_weights": WorkerExtension.update_weights}
    functions |= {n: getattr(AsyncLLM, n.split(".")[1]) for n in LISTING.signatures if n.startswith("AsyncLLM.")}
    for name, function in functions.items():
        parameters = [p for p in inspect.signature(function).parameters if p != "self"]
        assert parameters == LISTING.signatures[name], name
