"""What an engine process is started with and what it answers: plain values, the same on both sides of the socket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

# {"path", "records"} in host memory, or {"handles", "records"} by CUDA IPC; records: shared_weights.TensorRecord
WorkerBucket = dict[str, object]


@dataclass(frozen=True)
class EngineOptions:
    """Arguments of the engine process; see config.RolloutConfig for those with a key there."""

    engine: str  # key of rollout.registry.ENGINES
    model: str  # Hugging Face directory; its config.json alone is read
    vocab: int
    context: int  # prompt + response tokens at most
    dtype: str  # "bfloat16", or "float32" in tests on a CPU
    max_rows: int  # in flight at a time, at most
    stop_ids: tuple[int, ...]
    section: Mapping[str, Any]  # all keys of section [engine]
    stop_strings: tuple[str, ...] = ()  # of the configuration: where there are any, the engine needs the tokenizer
    threads: int = 0  # that an engine on CPUs computes with; 0 = as many as it likes
    kv_bytes: int = 0  # of an engine on CPUs, that its keys and values may take
    max_kv_tokens: int = 0  # of keys and values that there is planned room for (models.memory); 0 = as many as fit

    @property
    def key(self) -> str:
        """The choice of the engine as messages name it."""
        return f'rollout.engine = "{self.engine}"'


@dataclass(frozen=True)
class Capabilities:
    """What this build of an engine does, found out by its leaf when it starts."""

    engine: str  # name, version and what else tells it from others, for messages
    torch: str  # version
    seeds: Literal["request", "generator"]  # a request's seed counts, or only that of the engine's one generator
    keeps_cut: bool  # a rollout that is given up comes with the tokens that it has
    log_probs: Literal["processed", "tempered", "raw"]  # after temperature and cuts; after temperature; of the model
    if_repeating: str  # what to choose where it draws several rollouts by the same random numbers
    devices: tuple[str, ...]  # UUID of each worker's, as cuda_ipc.own_device writes it
    kv_tokens: int  # tokens whose keys and values its memory holds, measured
    rows: int  # rollouts that it computes at a time: no more than that need be asked at once
    details: Mapping[str, Any]  # for people: what the leaf found out beyond that
