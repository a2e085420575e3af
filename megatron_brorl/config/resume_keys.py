"""Which keys a resumed run must share with the run that it continues.

These are the keys that decide the model, the data and their order, the meaning of a reward, or what something in the
checkpoint means: rollouts that wait, evaluations, Adam's moments, which models there are. Every other key may change,
and the change is logged.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from megatron_brorl.config.schema import Config

# Of these sections every key but the named ones. Rows are compared by their content, wherever their files are.
_ALL_BUT = {"data": {"train", "held_out"}, "reward": {"workers", "timeout_s", "unsandboxed"}}
# Of these sections the named keys.
_THESE = {
    "run": {"seed"},
    "model": {"dtype"},
    "rollout": {
        "max_tokens",
        "stop_strings",
        "partial_tokens",
        "refills",
    },  # evaluations; what a step leaves to the next
    "algo": {"gamma"},  # the critic's values
    "optim": {"betas"},  # Adam's moments
    "evaluate": {"temperature", "top_p", "top_k"},  # the best pass@1, and that before the first step
}
# How rollouts are sampled, where a step leaves some to the next: their groups and log-probabilities are in checkpoints.
_OF_WAITING = {"n", "temperature", "top_p", "top_k"}
# Keys that decide which models a checkpoint holds, as functions of their values.
_MODELS: Mapping[str, Callable[[Any], bool]] = {
    "algo.advantage": lambda value: value == "gae",
    "algo.kl_coef": lambda value: value > 0,
}


@functools.cache
def fixed_keys() -> frozenset[str]:
    """Return the section.key of every key that a resumed run must keep, whatever the others are."""
    found = {f"{section}.{key}" for section, keys in _THESE.items() for key in keys}
    for section, free in _ALL_BUT.items():
        names = {f.name for f in dataclasses.fields(getattr(Config(), section))}
        found |= {f"{section}.{key}" for key in names - free}
    return frozenset(found)


def may_change(path: str, old: Any, new: Any, rollout: Mapping[str, Any]) -> bool:
    """Return whether a resumed run may have `new` for section.key, where the checkpoint was written with `old`.

    rollout: the values of section [rollout] that the checkpoint was written with.
    """
    if path in _MODELS:
        return _MODELS[path](old) == _MODELS[path](new)
    section, _, key = path.partition(".")
    waiting = bool(rollout.get("partial_tokens") or rollout.get("refills"))
    return path not in fixed_keys() and not (waiting and section == "rollout" and key in _OF_WAITING)
