"""Start engine processes with the real vLLM."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contract import engines

from megatron_brorl.rollout.engine import Sampling
from megatron_brorl.rollout.remote.remote_engine import RemoteEngine
from megatron_brorl.types import Rollout

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("BRORL_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=24, stop_ids=(2,))
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, max_tokens=24, stop_ids=())
# vLLM's attention on CPUs needs head dimensions of at least 32.
SIZES = {"hidden_size": 128, "head_dim": 32, "num_hidden_layers": 2}


class Model(engines.Model):
    """A tiny model in a directory, and its weights as the trainer sends them."""

    def __init__(self, directory: Path, family: str, tied: bool, **overrides: Any) -> None:
        super().__init__(directory, family, tied, std=0.1, **SIZES, **overrides)

    def change(self, seed: int, std: float = 0.05) -> None:
        """Add noise to every parameter, much more than an optimizer step changes."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in self.module.parameters():
                p.add_(torch.randn(p.shape, generator=generator), alpha=std)

    def gap(self, rollouts: list[Rollout]) -> float:
        """Return the largest difference of log-probabilities to those of transformers at temperature 1."""
        return max(float((self.log_probs(r) - r.log_probs).abs().max()) for r in rollouts)


def make_engine(
    model: Model,
    log: Path,
    config: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> RemoteEngine:
    keys = {"python": str(PYTHON), "cuda_graphs": True, **(config or {})}
    fields = {"engine": "vllm", "context": 64, "max_rows": 512, "threads": 1, "kv_bytes": 1 << 30, **(options or {})}
    return engines.make_engine(model, log, keys, fields, decode=decode)


draw = partial(engines.draw, sampling=SAMPLING)


def tokens(rollouts: list[Rollout]) -> list[list[int]]:
    return [r.token_ids.tolist() for r in rollouts]
