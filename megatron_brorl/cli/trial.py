"""Trial calls of a user's advantage and policy loss, so that mistakes appear before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron_brorl.algo import functions
from megatron_brorl.algo.advantages import group_advantages
from megatron_brorl.algo.policy_loss import PolicyLossSettings, PolicyTokens, policy_loss
from megatron_brorl.config.schema import Config
from megatron_brorl.user_functions import is_function


def check_user_functions(
    config: Config, rows: Sequence[Mapping[str, Any]], in_process: Mapping[str, Callable[..., Any]]
) -> dict[str, str]:
    """Import the users' functions of a run, call them, and return their SHA-256 by name. Raises UserError.

    The advantage is called with rollout.n rollouts for each of `rows`, every second one right, and the policy loss with
    two responses of three tokens. A group reward is only imported; train.group_rewards calls it.
    """
    algo = config.algo
    values = {
        "algo.advantage": algo.advantage,
        "algo.policy_loss": algo.policy_loss,
        "reward.group_function": config.reward.group_function,
    }
    hashes = functions.import_functions(values, in_process)
    if is_function(algo.advantage):
        rewards = (torch.arange(config.rollout.n) % 2).float().repeat(len(rows), 1)
        group_advantages(rewards, mask=torch.ones_like(rewards, dtype=torch.bool), rows=rows, algo=algo)
    if is_function(algo.policy_loss):
        log_probs = torch.linspace(-2, -1, 6, requires_grad=True)
        signs = torch.tensor([1.0, 1, 1, -1, -1, -1])
        tokens = PolicyTokens(log_probs.detach(), advantages=signs, weights=torch.ones(6), sequences=(signs < 0).long())
        settings = PolicyLossSettings(policy_loss=algo.policy_loss)
        policy_loss(log_probs, entropy=torch.ones(6, requires_grad=True), tokens=tokens, settings=settings)
    return hashes
