"""The reference policy of the KL: the actor's weights at the start of the run or at the last reset.

Only trained weights are stored: with LoRA the adapters, whose results are 0 at the start of the run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_brorl.config.schema import ReferenceConfig
from megatron_brorl.train.offload import Offload
from megatron_brorl.train.worker import Worker


class ReferencePolicy:
    """The reference's weights of this rank. They are swapped with the actor's to compute log-probabilities."""

    def __init__(self, worker: Worker, config: ReferenceConfig) -> None:
        self.worker = worker
        self.config = config
        self.weights = {name: p.detach().clone() for name, p in self._of_actor().items()}
        self._offload = Offload(self.weights.values) if worker.options.offload else None

    def offload(self) -> None:
        """Move the weights to host memory with train.offload; `log_probs` and `reset` bring them back."""
        if self._offload:
            self._offload.offload()

    def reload(self) -> None:
        """Undo `offload`, for callers that read the weights directly."""
        if self._offload:
            self._offload.reload()

    def log_probs(self, prompts: Sequence[Tensor], responses: Sequence[Tensor], temperature: float) -> list[Tensor]:
        """Return the reference's log-probabilities as Worker.log_probs does; the actor's weights do not change."""
        self._swap()
        try:
            return self.worker.log_probs(prompts, responses, temperature)
        finally:
            self._swap()

    def reset_reason(self, step: int, evaluations: int) -> str:
        """Return the reason to reset the reference after `step` steps, or "" if no reset is due.

        evaluations: those without a new best since the last one or the last reset.
        """
        c = self.config
        if c.reset_every and step % c.reset_every == 0:
            return f"reference.reset_every = {c.reset_every} steps"
        if c.reset_patience and evaluations >= c.reset_patience:
            return f"{evaluations} evaluations without a new best (reference.reset_patience)"
        return ""

    def reset(self) -> None:
        """Copy the actor's weights to the reference."""
        self.worker.reload()
        self.reload()
        for name, p in self._of_actor().items():
            self.weights[name].copy_(p.detach())

    def _of_actor(self) -> dict[str, torch.nn.Parameter]:
        """Return the actor's parameters that are trained."""
        return {name: p for name, p in self.worker.actor.named_parameters() if p.requires_grad}

    def _swap(self) -> None:
        self.worker.reload()
        self.reload()
        with torch.no_grad():
            for name, p in self._of_actor().items():
                own = p.clone()
                p.copy_(self.weights[name])
                self.weights[name].copy_(own)
