"""Rules of what the updates use: the engine's log-probabilities as the old policy, and the learning rate."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_brorl.config.schema import Config

Rule = tuple[bool, str, str]  # whether it is kept, the section.key that a message names, what that key must be


def update_rules(config: Config) -> Iterator[Rule]:
    """Yield the rules over several keys of [algo], [rollout] and [optim]."""
    yield from _rollout_log_probs(config)
    yield from _learning_rate(config)


def _rollout_log_probs(config: Config) -> Iterator[Rule]:
    algo, rollout = config.algo, config.rollout
    # Crossed bounds would mask every token.
    yield (
        algo.mismatch_low < algo.mismatch_high,
        "algo.mismatch_high",
        f"must be above mismatch_low = {algo.mismatch_low}",
    )

    # A mask needs two log-probs of a token that can differ.
    yield (
        algo.mismatch_mask == "off" or algo.old_log_probs == "actor",
        "algo.mismatch_mask",
        'algo.old_log_probs = "rollout" takes the engine for the trainer: no mismatch could show; set it to "actor"',
    )

    # The trainer's log-probs are of the whole softmax. Where both agree, they differ from the engine's by the logarithm
    # of the mass that the cut leaves.
    whole = rollout.top_p == 1 and rollout.top_k == 0
    renormalised = (
        f"rollout.top_p = {rollout.top_p:g} and rollout.top_k = {rollout.top_k} make the engine renormalise its "
        "log-probs over the tokens that are left, which the trainer does not"
    )
    # As the old policy, renormalised log-probs look like a policy that has moved: ratios below 1 are clipped before the
    # first update, and the KL in the reward counts the cut as a distance to the reference.
    yield (
        whole or algo.old_log_probs == "actor",
        "algo.old_log_probs",
        f'{renormalised}: must be "actor" (or rollout.top_p = 1 and rollout.top_k = 0)',
    )
    # As one side of a mismatch, they mask tokens on which engine and trainer agree.
    yield (
        whole or algo.mismatch_mask == "off",
        "algo.mismatch_mask",
        f'{renormalised}, and that hides a mismatch: must be "off" (or rollout.top_p = 1 and rollout.top_k = 0)',
    )


def _learning_rate(config: Config) -> Iterator[Rule]:
    optim, gae = config.optim, config.algo.advantage == "gae"
    # A step's rollouts have nothing to be compared with.
    yield optim.lr_counts == "asked" or optim.lr_for_rollouts > 0, "optim.lr_counts", "needs optim.lr_for_rollouts"

    # A floor or a length that nothing uses would pass for one that acts.
    decays = optim.lr_schedule != "constant"
    for key, value in (("optim.min_lr_ratio", optim.min_lr_ratio), ("optim.lr_decay_steps", optim.lr_decay_steps)):
        yield decays or not value, key, 'belongs to optim.lr_schedule = "linear" or "cosine": must be 0'

    # The decay begins when the warm-up is over. A run that is shorter than its warm-up is not refused.
    warm_up = max(optim.warmup_steps, config.critic.lr_warmup_steps if gae else 0)
    yield (
        optim.lr_decay_steps == 0 or optim.lr_decay_steps > warm_up,
        "optim.lr_decay_steps",
        f"includes the warm-up: must be above {warm_up} (optim.warmup_steps, critic.lr_warmup_steps), or 0",
    )
