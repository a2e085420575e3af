"""The keys of section [optim]: the optimizer of the actor, whose other settings the critic and `brorl sft` share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_brorl.config.bounds import at_least, within


@dataclass(frozen=True)
class OptimConfig:
    lr: float = at_least(0, default=1e-6)  # learning rate
    # The rollouts per step that lr is for: it is multiplied by the square root of a step's rollouts over this
    # (Krizhevsky 2014; BroRL, section 4.2.1); 0 = lr as it stands.
    lr_for_rollouts: int = at_least(0, default=0)
    # Which rollouts of a step lr_for_rollouts is compared with. "asked": rollout.prompts x rollout.n, the same in every
    # step; "kept": those that the step trains on, which is the paper's batch: after dynamic sampling
    lr_counts: Literal["asked", "kept"] = "asked"
    # Optimizer steps of linear warm-up of the learning rate. Only steps taken count: not a training step without a
    # signal, nor an update that was skipped because its gradient was not finite
    warmup_steps: int = at_least(0, default=0)
    # The learning rate after the warm-up, of the actor, the critic and `brorl sft`: "constant", or "linear" or "cosine"
    # decay to min_lr_ratio
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_ratio: float = within("[0, 1]", default=0.0)  # floor of "linear" and "cosine", as a share of lr
    # Optimizer steps taken, warm-up included, after which "linear" and "cosine" are at their floor. 0 = those of the
    # whole run, train.steps x algo.mini_batches x algo.epochs; `brorl sft` always takes sft.steps
    lr_decay_steps: int = at_least(0, default=0)
    betas: tuple[float, float] = within("[0, 1)", default=(0.9, 0.999))  # of AdamW's two moments
    eps: float = 1e-8  # of AdamW's denominator
    weight_decay: float = 0.01  # decoupled, as in AdamW
    clip_grad: float = at_least(0, default=1.0)  # norm that gradients are scaled down to; 0 = off
