"""What a resumed run must have in common with the one that it goes on from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_brorl.config.bounds import free_keys
from megatron_brorl.config.data_keys import ColumnsConfig
from megatron_brorl.config.renamed import with_names_of_now
from megatron_brorl.config.schema import Config
from megatron_brorl.errors import UserError, shown
from megatron_brorl.model_shape import ModelShape

Fingerprint = dict[str, dict[str, Any]]  # section -> key -> value, as JSON has them

_SECTIONS = ("data", "rollout", "reward", "shaping", "algo", "critic", "reference", "ops", "optim")
_FILES = "own_verifiers"  # the section of the sha256 of files that are code of the user's own
_INPUTS = "inputs"  # the section of the sha256 of what the run is fed
_PATHS = ("train", "held_out")  # of [data]: where rows lie, which inputs has by what they are

# What runs did before a key decided it: checkpoints that are older than the key were written with this.
BEFORE_THE_KEY: Fingerprint = {
    "data": {"verifier": "exact", "mixture": [], "system_prompt": "", "columns": dataclasses.asdict(ColumnsConfig())},
    "reward": {"combination": [], "correct_at": 0.99},
    "algo": {"policy_loss": "clip", "tau_pos": 1.0, "tau_neg": 1.05, "pass_k": 0, "focal_gamma": 0.0},
    "optim": {"decay_norms_and_biases": True, "lr_counts": "asked"},
    "rollout": {"max_oversample": 1.0},
}


def fingerprint(
    config: Config, shape: ModelShape, own_verifiers: Mapping[str, str], inputs: Mapping[str, str] | None = None
) -> Fingerprint:
    """Everything that decides what a run computes, for its checkpoints.

    own_verifiers: the sha256 of the file of each verifier that is the user's own, by its name. inputs: the sha256 of
    "tokenizer", "train" and "held_out" (data.digest).
    """
    # The keys of these sections, without those that may change (config.bounds.free).
    sections = dataclasses.asdict(config)
    kept = {name: sections[name] for name in _SECTIONS}
    for name in _SECTIONS:
        for key in free_keys(type(getattr(config, name))):
            del kept[name][key]
    if not config.rollout.refills:  # it decides nothing then
        del kept["rollout"]["max_oversample"]

    kept["run"] = {"seed": config.run.seed}
    kept[_FILES], kept[_INPUTS] = dict(own_verifiers), dict(inputs or {})
    kept["model"] = {**dataclasses.asdict(shape), "dtype": config.model.dtype}
    plain: Fingerprint = json.loads(json.dumps(kept))
    return plain


def check_fingerprint(saved: Fingerprint, current: Fingerprint, where: Path) -> None:
    """Raise UserError naming the first key in which a checkpoint (`where`) and this run differ, with both values."""
    if not (isinstance(saved, dict) and all(isinstance(values, dict) for values in saved.values())):
        raise UserError(f"{where}: its fingerprint is no table of tables; delete it to go on from an older checkpoint")

    # Key by key of what this run is made of: what older versions did not know has the value that they lived by.
    for section, values in current.items():
        found = {**BEFORE_THE_KEY.get(section, {}), **with_names_of_now(section, saved.get(section, {}))}
        for key, value in values.items():
            if found.get(key) == value or _told_otherwise(section, key, saved):
                continue
            raise UserError(
                f"{where}: was written with {_difference(section, key, found.get(key), value)}, or start anew with "
                "another run.dir or train.resume=never"
            )


def _told_otherwise(section: str, key: str, saved: Fingerprint) -> bool:
    """Whether a key needs no comparison: rows are known by what they are, in checkpoints that say it."""
    if section == _INPUTS:
        return key not in saved.get(_INPUTS, {})
    return section == "data" and key in _PATHS and bool(saved.get(_INPUTS))


def _difference(section: str, key: str, old: Any, new: Any) -> str:
    hashes = f"(sha256 {str(old)[:12]}, now {str(new)[:12]})"
    if section == _FILES:
        return f"another file of verifier {key} {hashes}: put it back as it was"
    if section == _INPUTS and key == "tokenizer":
        return f"other tokenizer files in model.path {hashes}: put them back as they were"
    if section == _INPUTS:
        return f"other rows of data.{key} {hashes}: put the data back as they were"
    return f"{section}.{key} = {shown(old)}, now {shown(new)}: set it back"
