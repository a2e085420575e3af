"""The models that a step trains and asks about its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_brorl.checkpoints import hugging_face
from megatron_brorl.checkpoints.model_state import ModelState
from megatron_brorl.config.schema import OptimConfig
from megatron_brorl.families.shape import ModelShape
from megatron_brorl.models.critic import body, build_critic
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.train.reference import ReferencePolicy
from megatron_brorl.train.worker import LossFunction, Stage, StageOptions, Update, Worker


class CriticWorker(Stage):
    """The critic's stage on this rank; it begins as the actor's model with a value head of zeros."""

    def __init__(self, shape: ModelShape, grid: Grid, options: StageOptions, optim: OptimConfig) -> None:
        """optim is the critic's own."""
        self.shape, self.outputs = shape, 1
        self.critic = build_critic(shape, grid, options.dtype, options.ops, options.recompute, options.fields)
        super().__init__(self.critic, options, optim)

    def load_hf(self, directory: str | Path) -> None:
        """Fill the body from an actor's Hugging Face directory, and the value head with zeros."""
        own = ["output_layer.weight"]
        norms = self.critic.fused_norms
        read = hugging_face.load(self.critic, body(self.shape), self.grid, directory, norms, own, keep=self._keeps_read)
        self.critic.zero_value_head()
        self._fill_masters(read)

    def values(self, prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> list[Tensor]:
        """Values [G] float32 of the states before each response token, in row order, on every rank of the model's."""
        return self._per_token(prompts, responses, self.critic.values, lambda values: values)

    def train(
        self, prompts: Sequence[Tensor], responses: Sequence[Tensor], loss: LossFunction, lr: float
    ) -> tuple[Update, list[Any]]:
        """One optimizer step on rows [tokens] each, as Stage._train says."""
        return self._train(prompts, responses, loss, self.critic.values, lr)


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
