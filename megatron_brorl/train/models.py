"""The models that a step trains and asks about its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_brorl.checkpoints.model_state import ModelState
from megatron_brorl.train.critic_worker import CriticWorker
from megatron_brorl.train.reference import ReferencePolicy
from megatron_brorl.train.worker import Stage, Worker


@dataclass(frozen=True)
class TrainingModels:
    """This rank's part of each."""

    actor: Worker
    critic: CriticWorker | None = None  # of algo.advantage = "gae"
    reference: ReferencePolicy | None = None  # of algo.kl_coef

    def stages(self) -> list[Stage]:
        """The models that have an optimizer."""
        return [self.actor, *([self.critic] if self.critic else [])]

    def offload(self, actor_weights: bool = True) -> None:
        """Give back the memory that the engine is to have. actor_weights: the actor's weights too, where they move."""
        for stage in self.stages():
            stage.offload(weights=actor_weights or stage is not self.actor)
        if self.reference:
            self.reference.offload()

    def checkpoint_parts(self) -> list[ModelState]:
        """What a checkpoint holds of them, in device memory."""
        for stage in self.stages():
            stage.reload()
        if self.reference:
            self.reference.reload()
        parts = [ModelState("", self.actor.actor, self.actor.optimizer)]
        if self.critic:
            parts.append(ModelState("critic", self.critic.critic, self.critic.optimizer))
        if self.reference:
            parts.append(ModelState("reference", self.actor.actor, weights=self.reference.weights))
        return parts
