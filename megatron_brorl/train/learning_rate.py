"""The learning rate of each optimizer step: warm-up, decay to a floor, and the rule for the size of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from megatron_brorl.config.schema import AlgoConfig, OptimConfig

# optim.lr_schedule -> the decay from 1 to 0 as a function of x, from 0 to 1
_SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda x: 1.0,
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
}


def learning_rate(optim: OptimConfig, update: int, total: int = 0) -> float:
    """Return the learning rate of the next optimizer step, a function of the number of steps taken before it.

    With lr = optim.lr, W = optim.warmup_steps, T = total and m = optim.min_lr_ratio: lr (update + 1) / W for
    update < W, then lr (m + (1 - m) schedule(x)) with x = (update - W) / (T - W), at most 1. A constant learning rate
    does not need `total`, the optimizer steps of the run.
    """
    if update < optim.warmup_steps:
        return optim.lr * ((update + 1) / optim.warmup_steps)
    # A warm-up that lasts as long as the run leaves no steps for the decay.
    length = max(total - optim.warmup_steps, 1)
    x = min((update - optim.warmup_steps) / length, 1.0)
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * _SCHEDULES[optim.lr_schedule](x))


def optimizer_steps(algo: AlgoConfig, steps: int) -> int:
    """Return the number of optimizer steps of `steps` training steps.

    Steps without an update are not known beforehand. They leave the schedule where it is.
    """
    return max(steps, 0) * algo.mini_batches * algo.epochs


def scaled(optim: OptimConfig, rollouts: int) -> OptimConfig:
    """Scale the learning rate for a step that trains on B rollouts: lr sqrt(B / B_0), B_0 = optim.lr_for_rollouts."""
    if not optim.lr_for_rollouts:
        return optim
    return replace(optim, lr=optim.lr * math.sqrt(rollouts / optim.lr_for_rollouts))
