"""Router replay: train a token with the experts that the engine chose for it (Ma et al. 2025, R3).

Engine and trainer round differently. Where two experts have almost equal scores, their routers choose different ones,
and the log-probabilities of such tokens differ by much more than rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.transformer import TransformerLayer
from torch import Tensor

from megatron_brorl.models.layers.attention import Segments


@dataclass(frozen=True)
class Replay:
    """Given experts of a router's tokens. The router calls it in place of Megatron's RouterReplay."""

    experts: Tensor  # [tokens, k] int64

    def get_replay_topk(self, scores: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        """Return the experts' scores [tokens, k] from scores [tokens, experts], differentiable, and the experts."""
        return scores.gather(1, self.experts), self.experts


class ReplayLayer(TransformerLayer):
    """A layer whose router takes the experts of Segments.routes [tokens, layers, k]; with None, it chooses them.

    The routes are an argument of the call, so a recomputed call has those of its own micro-batch.
    """

    def forward(self, *args: Any, packed_seq_params: Segments, **kwargs: Any) -> Any:
        """See TransformerLayer."""
        routes = packed_seq_params.routes
        self.mlp.router.router_replay = None if routes is None else Replay(routes[:, self.layer_number - 1].long())
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
