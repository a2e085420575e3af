"""Start engine processes with the real vLLM."""

from __future__ import annotations

import dataclasses
import os
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

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("BRORL_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")
PROMPT = Prompt("a", "", (5, 6, 7), None, "exact")
SAMPLING = Sampling(1.0, 1.0, 0, 24, (2,))
GREEDY = Sampling(0.0, 1.0, 0, 24, ())
# vLLM's attention on CPUs needs head dimensions of at least 32.
SIZES = {"hidden_size": 128, "head_dim": 32, "num_hidden_layers": 2}


class Model:
    """A tiny model in a directory, and its weights as the trainer sends them."""

    def __init__(self, directory: Path, family: str, tied: bool, **overrides: Any) -> None:
        self.directory = directory
        self.module = tiny.make_model(directory, family, tied, 0, 0.1, **SIZES, **overrides)
        self.shape = read_shape(directory)

    def stream(self) -> Any:
        return with_checksums([(n, p.detach()) for n, p in self.module.named_parameters()])

    def change(self, seed: int, std: float = 0.05) -> None:
        """Add noise to every parameter, much more than an optimizer step changes."""
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in self.module.parameters():
                p.add_(torch.randn(p.shape, generator=draw), alpha=std)

    def logits(self, rollout: Rollout, prompt: tuple[int, ...] = PROMPT.token_ids) -> torch.Tensor:
        """Return the logits [G, V] of a response by transformers."""
        ids = torch.tensor([[*prompt, *rollout.token_ids.tolist()]])
        with torch.no_grad():
            logits: torch.Tensor = self.module(ids).logits[0, len(prompt) - 1 : -1]
        return logits

    def gap(self, rollouts: list[Rollout]) -> float:
        """Return the largest difference of log-probabilities to those of transformers at temperature 1."""
        own = [self.logits(r).log_softmax(-1).gather(-1, r.token_ids[:, None])[:, 0] for r in rollouts]
        return max(float((a - r.log_probs).abs().max()) for a, r in zip(own, rollouts, strict=True))


def make_engine(
    model: Model,
    log: Path,
    python: Path,
    config: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> RemoteEngine:
    c = EngineConfig(**{"python": str(python), **(config or {})})
    o = EngineOptions(
        **{
            "engine": "vllm",
            "model": str(model.directory),
            "vocab": model.shape.vocab,
            "context": 64,
            "dtype": "float32",
            "max_rows": 512,
            "stop_ids": (2,),
            "section": dataclasses.asdict(c),
            "threads": 1,
            "kv_bytes": 1 << 30,
            **(options or {}),
        }
    )
    folder = make_folder(c.shared_memory)
    return RemoteEngine(c, o, hf_shapes(model.shape), folder, [0], log, decode=decode)


def draw(engine: RemoteEngine, n: int = 16, first: int = 0, key: int = 11, **kwargs: Any) -> list[Rollout]:
    """Sample the siblings first .. first + n - 1 of PROMPT."""
    sampling = kwargs.pop("sampling", SAMPLING)
    return engine.generate([Request(PROMPT, key, n, first)], sampling, **kwargs)[0]


def tokens(rollouts: list[Rollout]) -> list[list[int]]:
    return [r.token_ids.tolist() for r in rollouts]
