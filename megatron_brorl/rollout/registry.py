"""Rollout engines that run in a process of their own: what is known of each before it starts.

An engine is an entry here and a package in rollout.remote: llm.py has its EngineBackend (remote.protocol), and
extension.py loads weights in its workers (remote.weights_receive).
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
    backend: str  # "module:class", imported only in the engine's process
    dtypes: tuple[str, ...]  # values of rollout.dtype that it computes in on a GPU
    takes_fp8_blocks: bool = False  # engine.quantization = "fp8": the trainer sends FP8 blocks; else full weights
    min_version: str = "0"  # the oldest version whose interface the backend knows
    needs: Mapping[str, str] = field(default_factory=dict)  # further packages -> what to do where one is missing
    # Variables that it needs beside a trainer; {folder} is the engine's own
    environment: Mapping[str, str] = field(default_factory=dict)

    def too_old(self, version: str) -> str:
        """Return a message if this version of the package is older than min_version, else ""."""
        try:
            old = Version(version) < Version(self.min_version)
        except InvalidVersion:  # a build from source may have a name instead
            old = False
        return f"{self.name} {version} is too old: install {self.min_version} or newer" if old else ""


ENGINES: Mapping[str, EngineKind] = {  # by the value of rollout.engine
    "trtllm": EngineKind(
        name="TensorRT-LLM",
        package="tensorrt_llm",
        backend="megatron_brorl.rollout.remote.trtllm.llm:TrtllmBackend",
        dtypes=("bf16",),
        takes_fp8_blocks=True,
        min_version="1.3.0rc29",  # of the Dockerfile; it takes a seed per request
        needs={"ray": "Ray starts its workers and is not here: pip install ray"},
        environment={
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # so that Ray listens on 127.0.0.1 alone, on Linux too
            "TLLM_RAY_FORCE_LOCAL_CLUSTER": "0",  # the Ray is the backend's, on ports of its own (trtllm.ray_node)
            "TLLM_NUMA_AWARE_WORKER_AFFINITY": "0",  # clashes with Ray's choice of cores
            "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL": "1",  # lower peak memory in a refit
            "NCCL_CUMEM_ENABLE": "1",  # tensor parallelism over nodes hangs at 0
        },
    ),
    "vllm": EngineKind(
        name="vLLM",
        package="vllm",
        backend="megatron_brorl.rollout.remote.vllm.llm:VllmBackend",
        dtypes=("bf16", "fp32"),
        min_version="0.32",  # initialize_layerwise_reload and finalize_layerwise_reload
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
