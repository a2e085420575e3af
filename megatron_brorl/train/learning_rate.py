"""The learning rate of each optimizer step: warm-up, decay to a floor, and the rule for the size of a batch."""

from __future__ import annotations

import math
from dataclasses import replace

from megatron_brorl.config.schema import Config, OptimConfig


def learning_rate(optim: OptimConfig, update: int) -> float:
    """Return the learning rate of the next optimizer step, a function of the number of steps taken before it.

    With lr = optim.lr, W = optim.warmup_steps, T = optim.lr_decay_steps and m = optim.min_lr_ratio: lr (update + 1) / W
    for update < W. Then, with x = (update - W) / (T - W), at most 1: lr ("constant"), lr (m + (1 - m) (1 - x))
    ("linear"), or lr (m + (1 - m) (1 + cos(pi x)) / 2) ("cosine").
    """
    if update < optim.warmup_steps:
        return optim.lr * ((update + 1) / optim.warmup_steps)
    if optim.lr_schedule == "constant":
        return optim.lr

    # A warm-up that lasts as long as the run leaves nothing to decay over.
    length = max(optim.lr_decay_steps - optim.warmup_steps, 1)
    progress = min((update - optim.warmup_steps) / length, 1.0)
    share = 1 - progress if optim.lr_schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * share)


def with_decay_steps(optim: OptimConfig, config: Config, steps: int) -> OptimConfig:
    """Fill in optim.lr_decay_steps where it is 0: the optimizer steps of `steps` training steps.

    Steps without an update are not known beforehand. They leave the schedule where it is.
    """
    of_run = max(steps, 0) * config.algo.mini_batches * config.algo.epochs
    return replace(optim, lr_decay_steps=optim.lr_decay_steps or of_run)


def scaled(optim: OptimConfig, asked: int, kept: int) -> OptimConfig:
    """Scale the learning rate for a step of B rollouts: lr sqrt(B / B_0), B_0 = optim.lr_for_rollouts.

    asked: rollouts that every step asks for. kept: rollouts that this one trains on. B is one of them, by
    optim.lr_counts.
    """
    if not optim.lr_for_rollouts:
        return optim
    rollouts = kept if optim.lr_counts == "kept" else asked
    return replace(optim, lr=optim.lr * math.sqrt(rollouts / optim.lr_for_rollouts))
