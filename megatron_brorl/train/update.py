"""The optimizer steps of one training step, critic and actor in turn."""

from __future__ import annotations

from megatron_brorl.config.schema import Config
from megatron_brorl.train.actor_update import update_policy
from megatron_brorl.train.critic_update import critic_optim, update_critic
from megatron_brorl.train.learning_rate import scaled, with_decay_steps
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
    """Update the critic and then the actor, one optimizer step per batch of rows; returns metrics. A collective.

    `state` counts the optimizer steps that were taken. A batch without rows and a gradient that is not finite are none.
    kept: rollouts of all ranks that the step trains on. While the critic warms up, the actor is not updated.
    """
    c, metrics, steps = config, {}, config.train.steps
    if models.critic:
        rates = with_decay_steps(critic_optim(c.critic, c.optim), c, steps)
        metrics = update_critic(models.critic, experience, batches, c.critic.clip, rates, state.critic_updates)
        # The actor's schedule has the training steps that are left after the critic's warm-up.
        steps -= c.critic.warmup_steps
        if state.critic_steps < c.critic.warmup_steps:
            batches = []

        # A step without a signal teaches the critic nothing, so that it is no part of the warm-up.
        state.critic_updates += int(metrics["critic_updates"])
        state.critic_steps += metrics["critic_updates"] > 0

    # The learning rate for this number of rollouts, and its schedule.
    optim = scaled(with_decay_steps(c.optim, c, steps), c.rollout.prompts * c.rollout.n, kept)
    updated = update_policy(models.actor, experience, batches, c.algo, optim, c.rollout.temperature, state.updates)
    state.updates += int(updated["updates"])

    # Log-probs over the tokens that a cut leaves do not tell whether engine and trainer agree.
    if c.rollout.top_p < 1 or c.rollout.top_k:
        del updated["logprob_gap_mean"], updated["logprob_gap_max"]
    return metrics | updated
