"""The advantages and policy losses that a configuration can name. The descriptions of their keys list these entries.

A new advantage is a function and an entry of ADVANTAGES. A function of a user has no entry: the configuration names it
by its file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Advantage:
    """One value of the config key algo.advantage."""

    function: str  # "module:function" of (rewards [groups, N], mask, rows) -> advantages [groups, N]
    meaning: str = ""
    whitened: bool = False  # over the global batch; false for advantages that are in units of their own group
    binary: bool = False  # needs rewards of 0 and 1
    takes_k: bool = False  # the function also receives k, the config key algo.pass_k


_MODULE = "megatron_brorl.algo.advantages"
ADVANTAGES = {
    # REINFORCE++-baseline (Hu et al. 2025, section 3.2), per trajectory as in BroRL, section 3.1.
    "reinforce_pp_baseline": Advantage(
        f"{_MODULE}:reinforce_pp_baseline",
        "reward minus the mean of its group, normalised over the step",
        whitened=True,
    ),
    "grpo": Advantage(f"{_MODULE}:grpo", "also divided by the standard deviation of the group"),
    "rloo": Advantage(f"{_MODULE}:rloo", "reward minus the mean of the other rollouts of its group"),
    # Dr. GRPO (Liu et al. 2025, arXiv 2503.20783, section 3.2) does not divide by a standard deviation.
    "dr_grpo": Advantage(f"{_MODULE}:reinforce_pp_baseline", "reward minus the mean of its group"),
    "maxrl": Advantage(f"{_MODULE}:maxrl", "also divided by the mean of the group", binary=True),
    "pass_at_k": Advantage(
        f"{_MODULE}:pass_at_k",
        "the contribution to pass@k, normalised over the step",
        whitened=True,
        binary=True,
        takes_k=True,
    ),
    "gae": Advantage(
        f"{_MODULE}:gae",
        "generalised advantage estimation with a critic, normalised over the tokens of the step",
        whitened=True,
    ),
}

# Their formulas are in algo.policy_loss.POLICY_LOSSES and in csrc/policy/ppo_loss_math.h.
POLICY_LOSSES = {
    "clip": "the clipped surrogate of PPO with separate bounds (DAPO)",
    "cispo": "bounds only on the importance weight, so that every token keeps its gradient (MiniMax-M1)",
    "sapo": "a smooth gate instead of bounds (SAPO)",
}


def advantage(name: str) -> Advantage:
    """Return the entry of an advantage, or one that names a function of the user."""
    return ADVANTAGES.get(name) or Advantage(name)


def listed(meanings: Mapping[str, str], own: str) -> str:
    """Return the values of a key in words. own: the form of a user's function."""
    known = " ".join(f'"{name}": {meaning}.' for name, meaning in meanings.items())
    return f'{known} "{own}": your own function (docs/extending.md).'
