"""The models of a training step: the actor, the critic, the reference policy and the teacher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_brorl.checkpoints.model_state import ModelState
from megatron_brorl.config.schema import OptimConfig, ReferenceConfig
from megatron_brorl.families.shape import ModelShape
from megatron_brorl.models.gpt import build_critic, critic_body
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.train.worker import Offload, Stage, StageOptions, Worker


class CriticWorker(Stage):
    """The critic's pipeline stage on this rank: the actor's model with a value head, whose weights start at 0."""

    def __init__(self, shape: ModelShape, grid: Grid, options: StageOptions, optim: OptimConfig) -> None:
        self.shape = shape
        self.outputs = 1
        self.critic = build_critic(shape, grid, options.dtype, options.ops, options.recompute, options.fields)
        super().__init__(self.critic, options, optim)

    def load_hf(self, directory: str | Path) -> None:
        """Fill the body from an actor's Hugging Face directory, and the value head with zeros."""
        if self.critic.post_process:
            torch.nn.init.zeros_(self.critic.output_layer.weight)
        self._load(critic_body(self.shape), directory, ["output_layer.weight"])

    def values(self, prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> list[Tensor]:
        """Return for each row the values [G] float32 before its G response tokens, on all ranks of the replica."""
        return self._per_token(prompts, responses, self.critic.values, lambda values: values)


class ReferencePolicy:
    """The reference of the KL: the actor's weights of this rank at the start of the run or at the last reset.

    Only trained weights are stored: with LoRA the adapters, whose results are 0 at the start of the run. The
    stored weights are swapped with the actor's to compute log-probabilities.
    """

    def __init__(self, worker: Worker, config: ReferenceConfig) -> None:
        self.worker = worker
        self.config = config
        self.weights = {name: p.detach().clone() for name, p in self._of_actor().items()}
        # With train.offload, `offload` moves the weights to host memory. `log_probs` and `reset` bring them back.
        offload = Offload(self.weights.values if worker.options.offload else tuple)
        self.offload = offload.offload
        self.reload = offload.reload

    def log_probs(self, prompts: Sequence[Tensor], responses: Sequence[Tensor], temperature: float) -> list[Tensor]:
        """Return the reference's log-probabilities as Worker.log_probs does; the actor's weights do not change."""
        self._swap()
        try:
            return self.worker.log_probs(prompts, responses, temperature)
        finally:
            self._swap()

    def reset_reason(self, step: int, evaluations: int) -> str:
        """Return the reason to reset the reference after `step` steps, or "" if no reset is due.

        evaluations: the number of those since the last new best or the last reset.
        """
        config = self.config
        if config.reset_every and step % config.reset_every == 0:
            return f"reference.reset_every = {config.reset_every} steps"
        if config.reset_patience and evaluations >= config.reset_patience:
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
                actor_weight = p.clone()
                p.copy_(self.weights[name])
                self.weights[name].copy_(actor_weight)


@dataclass(frozen=True)
class TrainingModels:
    """This rank's part of each model."""

    actor: Worker
    critic: CriticWorker | None = None  # for algo.advantage = "gae"
    reference: ReferencePolicy | None = None  # for algo.kl_coef > 0
    teacher: Worker | None = None  # for algo.distill_coef > 0

    def stages(self) -> dict[str, Stage]:
        """Return the models that have an optimizer, by name."""
        return {"actor": self.actor, **({"critic": self.critic} if self.critic else {})}

    def require_finite(self, what: str, then: str) -> None:
        """Raise UserError if a trained weight is NaN or infinite; `then` ends the message. Collective."""
        for name, stage in self.stages().items():
            stage.require_finite(f"{what}, {name}", then)

    def offload(self, actor_weights: bool = True) -> None:
        """Free device memory for the engine. actor_weights: whether the actor's weights may move, too."""
        for stage in self.stages().values():
            stage.offload(weights=actor_weights or stage is not self.actor)
        if self.reference:
            self.reference.offload()
        if self.teacher:
            self.teacher.offload()

    def checkpoint_parts(self) -> list[ModelState]:
        """Return the states that a checkpoint stores, in device memory."""
        for stage in self.stages().values():
            stage.reload()
        if self.reference:
            self.reference.reload()
        parts = [ModelState(name="", module=self.actor.actor, optimizer=self.actor.optimizer)]
        if self.critic:
            parts.append(ModelState("critic", self.critic.critic, self.critic.optimizer))
        if self.reference:
            parts.append(ModelState("reference", self.actor.actor, weights=self.reference.weights))
        return parts
