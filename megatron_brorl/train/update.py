"""The optimizer steps of one training step, critic and actor in turn."""

from __future__ import annotations

from megatron_brorl.config.schema import Config
from megatron_brorl.train.actor_update import scaled, update_policy
from megatron_brorl.train.critic_update import critic_optim, update_critic
from megatron_brorl.train.skipped import Keeper
from megatron_brorl.train.state import RunState
from megatron_brorl.train.training_models import TrainingModels
from megatron_brorl.types import Experience


def update_models(
    models: TrainingModels,
    experience: Experience,
    batches: list[list[int]],
    kept: int,
    config: Config,
    state: RunState,
) -> dict[str, float]:
    """The critic's optimizer steps and then the actor's, one per batch of rows; `state` counts both.

    kept: rollouts of all ranks that the step trains on. A collective, which returns metrics. While the critic warms up,
    the actor has none.
    """
    c, metrics = config, {}
    if models.critic:
        rates = critic_optim(c.critic, c.optim)
        metrics = update_critic(models.critic, experience, batches, c.critic.clip, rates, state.critic_updates)
        state.critic_updates += len(batches)
        if state.step < c.critic.warmup_steps:
            batches = []

    # A rate for so many rollouts.
    optim = scaled(c.optim, c.rollout.prompts * c.rollout.n, kept)
    keep = Keeper(c, state.step).keep if c.train.keep_nonfinite else None
    given = (models.actor, experience, batches, c.algo, optim, c.rollout.temperature, state.updates)
    updated = update_policy(*given, keep)
    state.updates += len(batches)
    return metrics | updated
