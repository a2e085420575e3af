"""Rollout engines that run in a process of their own: what is known of each before it starts.

An engine is an entry here and a package in rollout.remote with two modules: llm.py, whose class Llm is a
remote.protocol.EngineLeaf, and the extension of its workers, which loads what remote.weights_receive gives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from packaging.version import InvalidVersion, Version


@dataclass(frozen=True)
class EngineKind:
    """What the trainer knows of an engine that it cannot import."""

    name: str  # in messages
    package: str  # that its environment must have
    leaf: str  # module with the class Llm, imported in the engine's process alone
    dtypes: tuple[str, ...]  # values of rollout.dtype that it computes in on a GPU
    takes_fp8_blocks: bool = False  # engine.quantization = "fp8": the trainer sends FP8 blocks; else full weights
    least: str = "0"  # the oldest version whose interface the leaf knows
    needs: Mapping[str, str] = field(default_factory=dict)  # further packages -> what to do where one is missing
    # Variables that it needs beside a trainer; {folder} is the engine's own
    environment: Mapping[str, str] = field(default_factory=dict)

    def too_old(self, version: str) -> str:
        """What to do where this version of the package is older than `least`; "" where it is not, or says nothing."""
        try:
            old = Version(version) < Version(self.least)
        except InvalidVersion:  # a build from source may have a name instead
            old = False
        return f"{self.name} {version} is too old: install {self.least} or newer" if old else ""


ENGINES: Mapping[str, EngineKind] = {  # by the value of rollout.engine
    "trtllm": EngineKind(
        name="TensorRT-LLM",
        package="tensorrt_llm",
        leaf="megatron_brorl.rollout.remote.trtllm.llm",
        dtypes=("bf16",),
        takes_fp8_blocks=True,
        least="1.3.0rc29",  # of the Dockerfile; it takes a seed per request
        needs={"ray": "Ray starts its workers and is not here: pip install ray"},
        environment={
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # so that Ray listens on 127.0.0.1 alone, on Linux too
            "TLLM_RAY_FORCE_LOCAL_CLUSTER": "0",  # the Ray is the leaf's, on ports of its own (trtllm.ray_node)
            "TLLM_NUMA_AWARE_WORKER_AFFINITY": "0",  # clashes with Ray's choice of cores
            "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL": "1",  # lower peak memory in a refit
            "NCCL_CUMEM_ENABLE": "1",  # tensor parallelism over nodes hangs at 0
        },
    ),
    "vllm": EngineKind(
        name="vLLM",
        package="vllm",
        leaf="megatron_brorl.rollout.remote.vllm.llm",
        dtypes=("bf16", "fp32"),
        least="0.32",  # initialize_layerwise_reload and finalize_layerwise_reload
        environment={
            "VLLM_HOST_IP": "127.0.0.1",  # or its workers meet on an address that others reach
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines and trainer take turns on the same cores
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",  # the model is a folder
            "TMPDIR": "{folder}",  # of sockets and of what is compiled: it goes with the engine
        },
    ),
}
