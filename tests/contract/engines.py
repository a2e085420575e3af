"""Start engine processes with the fake tensorrt_llm."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tiny
import torch
from checksums import with_checksums

from megatron_brorl.config.schema import EngineConfig
from megatron_brorl.families.shape import read_shape
from megatron_brorl.models.weights.names import hf_shapes
from megatron_brorl.rollout.engine import Request, Sampling
from megatron_brorl.rollout.remote.process import make_folder
from megatron_brorl.rollout.remote.protocol import EngineOptions
from megatron_brorl.rollout.remote.remote_engine import RemoteEngine
from megatron_brorl.types import Prompt, Rollout

DOUBLE = Path(__file__).parent / "double"
PROMPT = Prompt("a", text="", token_ids=(5, 6, 7), answer=None, verifier="exact")
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=12, stop_ids=(2,))


class Model:
    """A tiny model in a directory, and its weights as the trainer sends them."""

    def __init__(self, directory: Path, family: str = "qwen2", tied: bool = False, **overrides: Any) -> None:
        self.directory = directory
        self.module = tiny.make_model(directory, family, tied, **overrides)
        self.shape = read_shape(directory)

    def stream(self, scale: float = 1.0) -> Any:
        return with_checksums([(n, p.detach() * scale) for n, p in self.module.named_parameters()])

    def logits(self, rollout: Rollout, prompt: tuple[int, ...] = PROMPT.token_ids) -> torch.Tensor:
        """Return the logits [G, V] of a rollout by transformers."""
        ids = torch.tensor([[*prompt, *rollout.token_ids.tolist()]])
        with torch.no_grad():
            logits: torch.Tensor = self.module(ids).logits[0, len(prompt) - 1 : -1]
        return logits

    def log_probs(self, rollout: Rollout) -> torch.Tensor:
        """Return the log-probabilities [G] of a rollout at temperature 1."""
        return self.logits(rollout).log_softmax(-1).gather(-1, rollout.token_ids[:, None])[:, 0]


def make_engine(
    model: Model,
    log: Path,
    config: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    leader: RemoteEngine | None = None,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> RemoteEngine:
    """Start an engine, or connect another rank to the leader's engine."""
    settings = EngineConfig(**{"cuda_graphs": False, **(config or {})})
    fields = {"engine": "trtllm", "context": 200, "dtype": "float32", "max_rows": 600, "stop_ids": (2,)}
    fields |= {"vocab": model.shape.vocab, "section": dataclasses.asdict(settings), **(options or {})}
    engine_options = EngineOptions(model=str(model.directory), **fields)
    folder = leader.folder if leader else make_folder(settings.shared_memory)
    devices = None if leader else [0]
    return RemoteEngine(settings, engine_options, hf_shapes(model.shape), folder, devices, log, decode=decode)


def draw(engine: RemoteEngine, n: int = 16, first: int = 0, key: int = 11, **kwargs: Any) -> list[Rollout]:
    """Sample the siblings first .. first + n - 1 of PROMPT."""
    sampling = kwargs.pop("sampling", SAMPLING)
    return engine.generate([Request(PROMPT, key, n, first)], sampling, **kwargs)[0]


def damage_staged_weights(engine: RemoteEngine) -> None:
    """Change a byte of each file of weights after the trainer has checked it."""
    stage = engine._write_update

    def damaged(tensors: Any, version: int) -> Any:
        weights = stage(tensors, version)
        with open(weights.path, "r+b") as file:
            file.seek(weights.records[7].offset + 5)  # the inside of any tensor
            file.write(b"\x55")
        return weights

    engine._write_update = damaged  # type: ignore[method-assign]


def same(a: list[Rollout], b: list[Rollout]) -> bool:
    def content(rollouts: list[Rollout]) -> list[tuple[Any, ...]]:
        return [(r.index, r.token_ids.tolist(), r.log_probs.tolist(), r.finish) for r in rollouts]

    return content(a) == content(b)
