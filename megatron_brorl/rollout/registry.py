"""Rollout engines that run in a process of their own: what is known of each before it starts.

An engine is an entry here, a section of the configuration by the same key (with the keys of
remote.options.ProcessSettings among its own), and a room in rollout.remote with two leaves: llm.py, whose class Llm is
a remote.protocol.EngineLeaf, and the extension of its workers, which loads what remote.bucket_reader gives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class EngineKind:
    """What the trainer knows of an engine that it cannot import."""

    name: str  # in messages
    package: str  # that its environment must have
    leaf: str  # module with the class Llm, imported in the engine's process alone
    dtypes: tuple[str, ...]  # values of rollout.dtype that it computes in on a GPU
    needs: Mapping[str, str] = field(default_factory=dict)  # further packages -> what to do where one is missing
    environment: Mapping[str, str] = field(default_factory=dict)  # variables that it needs beside a trainer


ENGINES: Mapping[str, EngineKind] = {  # by the value of rollout.engine
    "trtllm": EngineKind(
        name="TensorRT-LLM",
        package="tensorrt_llm",
        leaf="megatron_brorl.rollout.remote.trtllm.llm",
        dtypes=("bf16",),
        needs={"ray": "Ray starts its workers and is not here: pip install ray"},
        environment={
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # so that Ray listens on 127.0.0.1 alone, on Linux too
            "TLLM_RAY_FORCE_LOCAL_CLUSTER": "0",  # the Ray is the leaf's, on ports of its own (trtllm.ray_node)
            "TLLM_NUMA_AWARE_WORKER_AFFINITY": "0",  # clashes with Ray's choice of cores
            "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL": "1",  # lower peak memory in a refit
            "NCCL_CUMEM_ENABLE": "1",  # tensor parallelism over nodes hangs at 0
        },
    ),
}
