"""The names of advantages and policy losses, and their meanings for the descriptions of the keys.

The functions are in algo.advantages.ADVANTAGES and algo.policy_loss.POLICY_LOSSES. A function of a user has no name
here: the configuration names it by its file.
"""

from __future__ import annotations

from collections.abc import Mapping

ADVANTAGE_NAMES = {
    "reinforce_pp_baseline": "reward minus the mean of its group, normalised over the step",
    "grpo": "also divided by the standard deviation of the group",
    "rloo": "reward minus the mean of the other rollouts of its group",
    "dr_grpo": "reward minus the mean of its group",
    "maxrl": "also divided by the mean of the group",
    "pass_at_k": "the contribution to pass@k, normalised over the step",
    "gae": "generalised advantage estimation with a critic, normalised over the tokens of the step",
}
BINARY_ADVANTAGES = ("maxrl", "pass_at_k")  # need rewards of 0 and 1

POLICY_LOSS_NAMES = {
    "clip": "the clipped surrogate of PPO with separate bounds (DAPO)",
    "cispo": "bounds only on the importance weight, so that every token keeps its gradient (MiniMax-M1)",
    "sapo": "a smooth gate instead of bounds (SAPO)",
}


def listed(meanings: Mapping[str, str], own: str) -> str:
    """Return the values of a key in words. own: the form of a user's function."""
    known = " ".join(f'"{name}": {meaning}.' for name, meaning in meanings.items())
    return f'{known} "{own}": your own function (docs/extending.md).'
