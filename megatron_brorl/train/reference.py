"""The reference policy of the KL: the actor's weights of the start or of the last reset, one copy on each rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_brorl.config.schema import ReferenceConfig
from megatron_brorl.tracking.progress import Progress
from megatron_brorl.train.console import after
from megatron_brorl.train.early_stopping import Stall
from megatron_brorl.train.offload import Offload
from megatron_brorl.train.worker import Worker


class ReferencePolicy:
    """Log-probabilities of the reference run through the actor's own module, with the weights exchanged."""

    def __init__(self, worker: Worker, config: ReferenceConfig) -> None:
        self.worker, self.config = worker, config
        self.weights = {name: p.detach().clone() for name, p in worker.actor.named_parameters()}
        self.stall = Stall()  # of held-out pass@1
        self._away = Offload(self.weights.values) if worker.options.offload else None

    def offload(self) -> None:
        """Move the weights to host memory where config key train.offload says so, until they are needed."""
        if self._away:
            self._away.offload()

    def reload(self) -> None:
        """Undo `offload`, for whoever reads the weights directly."""
        if self._away:
            self._away.reload()

    def log_probs(self, prompts: Sequence[Tensor], responses: Sequence[Tensor], temperature: float) -> list[Tensor]:
        """As Worker.log_probs, [G] each, of the reference; a collective. The actor gets its own bits back."""
        self._exchange()
        try:
            return self.worker.log_probs(prompts, responses, temperature)
        finally:
            self._exchange()

    def reset_where_due(self, step: int, metrics: dict[str, float], progress: Progress) -> None:
        """After `step` steps, whose metrics get "reference_reset": 1 where the actor is the reference from here on."""
        why = self.due(step)
        metrics["reference_reset"] = float(bool(why))
        if why:
            self.reset()
            progress.note(f"{after(step)} the reference is now the policy: {why}")

    def due(self, step: int) -> str:
        """Return why a reset is due after `step` steps, or ""."""
        c = self.config
        if c.reset_every and step % c.reset_every == 0:
            return f"reference.reset_every = {c.reset_every} steps"
        if c.reset_patience and self.stall.count >= c.reset_patience:
            return f"{self.stall.count} evaluations without a new best (reference.reset_patience)"
        return ""

    def reset(self) -> None:
        """Make the actor as it is now the reference; the count of stalls begins anew."""
        self.worker.reload()
        self.reload()
        for name, p in self.worker.actor.named_parameters():
            self.weights[name].copy_(p.detach())
        if self.config.reset_optimizer:
            self.worker.reset_optimizer()
        self.stall.count = 0

    def _exchange(self) -> None:
        self.worker.reload()
        self.reload()
        with torch.no_grad():
            for name, p in self.worker.actor.named_parameters():
                own = p.clone()
                p.copy_(self.weights[name])
                self.weights[name].copy_(own)
