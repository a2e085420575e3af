"""The reference policy of the KL: the actor's weights of the start or of the last reset, one copy on each rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_brorl.config.schema import ReferenceConfig
from megatron_brorl.train.stall import Stall
from megatron_brorl.train.worker import Worker


class Reference:
    """Log-probabilities of the reference run through the actor's own module, with the weights exchanged."""

    def __init__(self, worker: Worker, config: ReferenceConfig) -> None:
        self.worker, self.config = worker, config
        self.weights = {name: p.detach().clone() for name, p in worker.actor.named_parameters()}
        self.stall = Stall()  # of held-out pass@1

    def log_probs(self, prompts: Sequence[Tensor], responses: Sequence[Tensor], temperature: float) -> list[Tensor]:
        """As Worker.log_probs, of the reference; a collective. The actor has its own bits again at the end."""
        self._exchange()
        try:
            return self.worker.log_probs(prompts, responses, temperature)
        finally:
            self._exchange()

    def due(self, step: int, kl: float) -> str:
        """Why a reset is due after `step` steps, the last of which had a mean KL of `kl`; "" where none is."""
        c = self.config
        if c.reset_every and step % c.reset_every == 0:
            return f"reference.reset_every = {c.reset_every} steps"
        if c.reset_above_kl and kl > c.reset_above_kl:
            return f"KL {kl:.2e} above reference.reset_above_kl = {c.reset_above_kl:g}"
        if c.reset_patience and self.stall.count >= c.reset_patience:
            return f"{self.stall.count} evaluations without a new best (reference.reset_patience)"
        return ""

    def reset(self) -> None:
        """Make the actor as it is now the reference; the count of stalls begins anew."""
        self.worker.reload()
        for name, p in self.worker.actor.named_parameters():
            self.weights[name].copy_(p.detach())
        if self.config.reset_optimizer:
            self.worker.reset_optimizer()
        self.stall.count = 0

    def _exchange(self) -> None:
        self.worker.reload()
        with torch.no_grad():
            for name, p in self.worker.actor.named_parameters():
                own = p.clone()
                p.copy_(self.weights[name])
                self.weights[name].copy_(own)
