"""Rollout engines that run in their own process, with the properties that the trainer needs before they start.

An engine is an entry here and a package in rollout.remote: llm.py has its EngineBackend (remote.protocol), and
extension.py loads weights in its workers (remote.weights_in_worker).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from packaging.version import InvalidVersion, Version

START_TIMEOUT_S = 1200.0  # until a new engine process answers
# An engine process that is silent, or does not finish one part of a weight update, for this long is restarted. It must
# exceed the longest step of an engine.
HEARTBEAT_TIMEOUT_S = 60.0
MAX_NUM_TOKENS = 8192  # tokens that an engine may process in one of its steps; a longer context raises it


@dataclass(frozen=True)
class EngineKind:
    """Properties of an engine, whose package the trainer cannot import."""

    name: str  # in messages
    package: str  # Python package that its environment must have
    backend: str  # "module:class", imported only in the engine's process
    dtypes: tuple[str, ...]  # supported values of rollout.dtype on a GPU
    returns_routes: bool = False  # supports Sampling.routes
    takes_fp8_blocks: bool = False  # with engine.quantization = "fp8", the trainer sends FP8 blocks
    min_version: str = "0"  # oldest version that the backend supports
    needs: Mapping[str, str] = field(default_factory=dict)  # further required packages -> remedy if one is missing
    # Environment variables of the process; {folder} is replaced by the engine's private folder.
    environment: Mapping[str, str] = field(default_factory=dict)

    def too_old(self, version: str) -> str:
        """Return a message if this version of the package is older than min_version, else ""."""
        try:
            old = Version(version) < Version(self.min_version)
        except InvalidVersion:  # builds from source may have a name as version
            old = False
        return f"{self.name} {version} is too old: install {self.min_version} or newer" if old else ""


ENGINES: Mapping[str, EngineKind] = {  # by the value of rollout.engine
    "trtllm": EngineKind(
        name="TensorRT-LLM",
        package="tensorrt_llm",
        backend="megatron_brorl.rollout.remote.trtllm.llm:TrtllmBackend",
        dtypes=("bf16",),
        takes_fp8_blocks=True,
        min_version="1.3.0rc29",  # the Dockerfile's version, which supports a seed per request
        needs={"ray": "Ray starts its workers and is not installed: pip install ray"},
        environment={
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # makes Ray listen only on 127.0.0.1, also on Linux
            "TLLM_RAY_FORCE_LOCAL_CLUSTER": "0",  # the backend starts Ray on its own ports (trtllm.ray_node)
            "TLLM_NUMA_AWARE_WORKER_AFFINITY": "0",  # conflicts with Ray's choice of cores
            "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL": "1",  # lower peak memory during weight sync
            "NCCL_CUMEM_ENABLE": "1",  # tensor parallelism over nodes hangs at 0
        },
    ),
    "vllm": EngineKind(
        name="vLLM",
        package="vllm",
        backend="megatron_brorl.rollout.remote.vllm.llm:VllmBackend",
        dtypes=("bf16", "fp32"),
        returns_routes=True,
        min_version="0.32",  # has initialize_layerwise_reload and finalize_layerwise_reload
        environment={
            "VLLM_HOST_IP": "127.0.0.1",  # otherwise its workers listen on a public address
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engine and trainer alternate on the same cores
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",  # the model is a local folder
            "TMPDIR": "{folder}",  # sockets and compiled code are removed with the engine
        },
    ),
}


def graph_sizes(rows: int) -> list[int]:
    """Return the batch sizes of CUDA graphs, up to `rows`. Padding to the next size adds at most 25% above 32 rows.

    By default, TensorRT-LLM's sizes double above 128, so that 260 rows would be padded to 512, and vLLM's end at 512.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, rows, 64)]
    return [size for size in sizes if size < rows] + [rows]
