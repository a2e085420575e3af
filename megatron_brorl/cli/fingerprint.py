"""What a resumed run must have in common with the one that it goes on from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_brorl.config.data_keys import ColumnsConfig
from megatron_brorl.config.renamed import with_names_of_now
from megatron_brorl.config.schema import Config
from megatron_brorl.errors import UserError
from megatron_brorl.model_shape import ModelShape

Fingerprint = dict[str, dict[str, Any]]  # section -> key -> value, as JSON has them

_SECTIONS = ("data", "rollout", "reward", "shaping", "algo", "critic", "reference", "ops", "optim")
_FILES = "own_verifiers"  # the section of the sha256 of files that are code of the user's own
# They decide when a run ends and who samples, not what it computes.
_FREE = {"rollout": ("timeout_s", "max_lost_share", "durable", "pull")}

# What runs did before a key decided it: checkpoints that are older than the key were written with this.
BEFORE_THE_KEY: Fingerprint = {
    "data": {"verifier": "exact", "mixture": [], "system_prompt": "", "columns": dataclasses.asdict(ColumnsConfig())},
    "reward": {"combination": []},
    "algo": {"policy_loss": "clip", "tau_pos": 1.0, "tau_neg": 1.05},
    "optim": {"decay_norms_and_biases": True},
    "rollout": {"max_oversample": 1.0},
}


def fingerprint(config: Config, shape: ModelShape, own_verifiers: Mapping[str, str]) -> Fingerprint:
    """Everything that decides what a run computes, for its checkpoints.

    own_verifiers: the sha256 of the file of each verifier that is the user's own, by its name.
    """
    sections = dataclasses.asdict(config)
    kept = {name: sections[name] for name in _SECTIONS}
    for section, keys in _FREE.items():
        for key in keys:
            del kept[section][key]
    if not config.rollout.refills:  # it decides nothing then
        del kept["rollout"]["max_oversample"]

    kept["run"] = {"seed": config.run.seed}
    kept[_FILES] = dict(own_verifiers)
    kept["model"] = {**dataclasses.asdict(shape), "dtype": config.model.dtype}
    plain: Fingerprint = json.loads(json.dumps(kept))
    return plain


def check_fingerprint(saved: Fingerprint, current: Fingerprint, where: Path) -> None:
    """Raise UserError naming the first key in which a checkpoint (`where`) and this run differ, with both values."""
    # Key by key of what this run is made of: what older versions did not know has the value that they lived by.
    for section, values in current.items():
        found = {**BEFORE_THE_KEY.get(section, {}), **with_names_of_now(section, saved.get(section, {}))}
        for key, value in values.items():
            old = found.get(key)
            if old != value and section == _FILES:
                raise UserError(
                    f"{where}: was written with another file of verifier {key} (sha256 {str(old)[:12]}, now "
                    f"{value[:12]}): put it back as it was, or start anew with another run.dir or train.resume=never"
                )
            if old != value:
                raise UserError(
                    f"{where}: was written with {section}.{key} = {old!r}, now {value!r}: set it back, or start anew "
                    "with another run.dir or train.resume=never"
                )
