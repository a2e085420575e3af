"""What a checkpoint knows of its run, and what a run that continues it may change."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_brorl.config.rules import may_change
from megatron_brorl.config.schema import Config
from megatron_brorl.data.source import TEMPLATE_DATE
from megatron_brorl.errors import UserError, shown
from megatron_brorl.model_shape import ModelShape

Fingerprint = dict[str, dict[str, Any]]  # section -> key -> value, as JSON has them
Changes = dict[str, tuple[Any, Any]]  # section.key -> value before and now

_SHAPE = "shape"  # the section of the model's shape
_FILES = "own_verifiers"  # the section of the sha256 of files that are code of the user's own
_INPUTS = "inputs"  # the section of the sha256 of what the run is fed


def fingerprint(
    config: Config, shape: ModelShape, own_verifiers: Mapping[str, str], inputs: Mapping[str, str] | None = None
) -> Fingerprint:
    """Return the configuration of a run and what it reads, for its checkpoints.

    own_verifiers: the sha256 of the file of each verifier that is the user's own, by its name. inputs: the sha256 of
    "tokenizer", "train" and "held_out" (Sources.digests), and the date of the chat template where it writes one.
    """
    kept = dataclasses.asdict(config)
    kept |= {_SHAPE: dataclasses.asdict(shape), _FILES: dict(own_verifiers), _INPUTS: dict(inputs or {})}
    # Through JSON, so that tuples equal the lists that a checkpoint gives back.
    plain: Fingerprint = json.loads(json.dumps(kept))
    return plain


def check_fingerprint(saved: Fingerprint, current: Fingerprint, where: Path) -> Changes:
    """Return the keys in which a checkpoint (`where`) and this run differ.

    Raises UserError naming the first one that must not change (config.rules), with both values.
    """
    if not (isinstance(saved, dict) and all(isinstance(values, dict) for values in saved.values())):
        raise UserError(f"{where}: its fingerprint is no table of tables; delete it to go on from an older checkpoint")

    changes: Changes = {}
    for section, values in current.items():
        before = saved.get(section, {})
        # Another function, other rows or another shape are never the same run.
        always = section in (_SHAPE, _FILES, _INPUTS)
        for key, new in values.items():
            old, path = before.get(key), f"{section}.{key}"
            if key in before and old == new:
                continue
            # A key that is not there cannot be compared: another version wrote the checkpoint.
            if always or key not in before or not may_change(path, old, new, saved.get("rollout", {})):
                raise UserError(
                    f"{where}: was written with {_difference(section, key, old, new)}, or start a new run with another "
                    "run.dir or train.resume=never"
                )
            # The caller logs a change that is allowed.
            changes[path] = (old, new)
    return changes


def change_line(changes: Changes) -> str:
    """Return the changes in words: "optim.lr = 1e-06 -> 5e-07, ..."; "" where there are none."""
    return ", ".join(f"{path} = {shown(old)} -> {shown(new)}" for path, (old, new) in changes.items())


def _difference(section: str, key: str, old: Any, new: Any) -> str:
    hashes = f"(sha256 {str(old)[:12]}, now {str(new)[:12]})"
    if section == _FILES:
        return f"another file of verifier {key} {hashes}: put it back as it was"
    if section == _INPUTS and key == TEMPLATE_DATE:
        return f"the date {old} in the prompts' chat template, now {new}: write {old} into run.dir/{key}"
    if section == _INPUTS and key == "tokenizer":
        return f"other tokenizer files in model.path {hashes}: put them back as they were"
    if section == _INPUTS:
        return f"other rows of data.{key} {hashes}: put the data back as they were"
    if section == _SHAPE:
        return f"another model in model.path ({key} = {shown(old)}, now {shown(new)}): put it back as it was"
    return f"{section}.{key} = {shown(old)}, now {shown(new)}: set it back"
