"""Looks at an engine in a process of its own: the double's arguments, and how its process is started and watched."""

from __future__ import annotations

import dataclasses
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from contract.engines import DOUBLE
from keys.case import Place

from megatron_brorl.config.schema import Config
from megatron_brorl.errors import UserError
from megatron_brorl.rollout.remote import group, process
from megatron_brorl.rollout.remote.engine import RemoteEngine
from megatron_brorl.rollout.remote.options import EngineOptions, process_settings
from megatron_brorl.rollout.remote.supervisor import Supervisor

_OURS = "megatron_brorl.rollout.remote.trtllm.llm"


def arguments(config: Config, place: Place) -> Any:
    """What TensorRT-LLM's double and its Ray are called with."""
    place.monkeypatch.syspath_prepend(str(DOUBLE))
    before = set(sys.modules)
    try:
        llm = importlib.import_module(_OURS)
        told: dict[str, Any] = {}
        place.monkeypatch.setattr(llm.ray_node, "start", lambda *given: told.update(ray=given))
        place.monkeypatch.setattr(llm, "AsyncLLM", lambda **given: told.update(given))
        options = EngineOptions(
            engine="trtllm",
            model="model",
            vocab=304,
            context=200,
            dtype="float32",
            max_rows=config.rollout.max_num_seqs,
            stop_ids=(2,),
            max_kv_tokens=4000,
            section=dataclasses.asdict(config.trtllm),
        )
        try:
            return repr(sorted(llm.Llm(options)._build() or told.items()))
        except ValueError as e:  # as the engine's process tells it
            raise UserError(str(e)) from None
    finally:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "tensorrt_llm" or name == _OURS:
                del sys.modules[name]
        place.monkeypatch.undo()
        place.monkeypatch.chdir(place.folder)


def vllm_arguments(config: Config, place: Place) -> Any:
    """What vLLM is told, on a GPU."""
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
        place.monkeypatch.setitem(sys.modules, name, module)
    place.monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    try:
        llm = importlib.import_module("megatron_brorl.rollout.remote.vllm.llm")
        options = EngineOptions(
            engine="vllm",
            model="model",
            vocab=304,
            context=200,
            dtype="float32",
            max_rows=config.rollout.max_num_seqs,
            stop_ids=(2,),
            max_kv_tokens=4000,
            section=dataclasses.asdict(config.vllm),
        )
        return llm.Llm(options).arguments()
    finally:
        sys.modules.pop("megatron_brorl.rollout.remote.vllm.llm", None)
        place.monkeypatch.undo()
        place.monkeypatch.chdir(place.folder)


class _Ended:
    """A process that could not take a port, or one that only waits."""

    pid, stdin = 2**22 + 1, None

    def __init__(self, log: Any, waits: bool) -> None:
        self.waits = waits
        log.write(b"" if waits else b"address already in use\n")

    def poll(self) -> int | None:
        return None if self.waits else 1

    def wait(self) -> int:
        return 1


def _joined(config: Config, place: Place, waits: bool) -> Any:
    started: list[Any] = []

    def popen(command: Any, *, stdout: Any, env: Any, **_: Any) -> _Ended:
        started.append((command[0], Path(env["PYTHONPATH"].split(os.pathsep)[0]).parents[1]))
        return _Ended(stdout, waits)

    Path("memory").mkdir(exist_ok=True)
    fake = SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT)
    place.monkeypatch.setattr(process, "subprocess", fake)
    place.monkeypatch.setattr(process.os, "killpg", lambda *_: None)
    begun = time.monotonic()
    try:
        group.join(config, {}, 200, 304, (2,))
    except UserError:  # it never comes up
        pass
    finally:
        place.monkeypatch.undo()
        place.monkeypatch.chdir(place.folder)
    return started, time.monotonic() - begun > 0.6


def starts(config: Config, place: Place) -> Any:
    """The processes that are started one after another, none of which gets its port, and their folders."""
    return _joined(config, place, waits=False)[0]


def patience(config: Config, place: Place) -> Any:
    """Whether a process that says nothing has more than 0.6 seconds."""
    return _joined(config, place, waits=True)[1]


def silence(config: Config, place: Place) -> Any:
    """Whether a process that was last heard ten seconds ago is given up."""
    supervisor: Any = Supervisor.__new__(Supervisor)
    supervisor.settings = process_settings(getattr(config, config.rollout.engine))
    supervisor._process = SimpleNamespace(ended=lambda: "", pid=1)
    supervisor._link = SimpleNamespace(heard=time.monotonic() - 10)
    return bool(supervisor._problem())


def transports(config: Config, place: Place) -> Any:
    """Whether weights would go by CUDA IPC, on this machine."""
    engine: Any = RemoteEngine.__new__(RemoteEngine)
    engine.settings = process_settings(getattr(config, config.rollout.engine))
    engine.options = SimpleNamespace(engine=config.rollout.engine)
    engine.capabilities = SimpleNamespace(torch="another", devices=())
    return engine._by_ipc()
