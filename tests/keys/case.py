"""One row of the table: a key, a value to change it to, and where to look for what that changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_brorl.config.load import load_table
from megatron_brorl.config.schema import Config
from megatron_brorl.errors import UserError

Values = Mapping[str, Any]  # "section.key": value, as TOML has it


@dataclass
class Place:
    """What looks may use: this process's grid, pytest's monkeypatch, and a folder, which is the working directory."""

    grid: Any
    monkeypatch: Any
    folder: Path


Look = Callable[[Config, Place], Any]  # what can be seen of a configuration; the same each time


@dataclass(frozen=True)
class Case:
    look: Look
    after: Any  # the key's value, or of a key in a list of tables the whole list
    before: Any = None  # likewise; None: the key is left out
    beside: Values = field(default_factory=dict)  # what else is set, on both sides
    refused: str = ""  # in the line that ends exactly one of the two sides; "": both go through


BASE: Values = {
    "run.seed": 3,
    "run.dir": "run",
    "run.log": [],
    "model.path": "model",
    "data.train": ["train.jsonl"],
    "data.held_out": ["held_out.jsonl"],
    "rollout.n": 8,
    "rollout.prompts": 4,
    "rollout.max_tokens": 12,
    "rollout.timeout_s": 60.0,
    "rollout.max_lost_share": 1.0,
    "reward.workers": 1,
    "algo.mini_batches": 2,
    "optim.lr": 5e-3,
    "train.steps": 2,
    "train.tokens_per_micro_batch": 600,
    "train.checkpoint_every": 0,
    "evaluate.samples": 4,
    "evaluate.bootstrap": 100,
    "theory.every": 0,
    "sft.steps": 2,
    "sft.examples_per_step": 8,
}


def configured(values: Values) -> Config:
    """BASE with these; None leaves a key out."""
    table: dict[str, Any] = {}
    for path, value in {**BASE, **values}.items():
        section, *rest = path.split(".")
        inner = table.setdefault(section, {})
        for name in rest[:-1]:
            inner = inner.setdefault(name, {})
        if value is not None:
            inner[rest[-1]] = value
    return load_table(table, "the table")


def seen(look: Look, values: Values, place: Place) -> tuple[Any, str]:
    """(what there is to see, "") or (None, the line that refuses it)."""
    try:
        return look(configured(values), place), ""
    except UserError as e:
        return None, str(e)


def set_at(path: str) -> str:
    """The key that is set for this one: itself, or the list of tables that it stands in."""
    return path.partition("[]")[0]


def differences(before: Any, after: Any) -> set[str]:
    """Keys, as describe.keys writes them behind the list's name, in which two lists of tables differ."""
    if isinstance(before, list) and isinstance(after, list) and all(isinstance(x, dict) for x in (*before, *after)):
        return {f"[].{name}" for a, b in zip(before, after, strict=True) for name in differences(a, b)}
    if isinstance(before, dict) and isinstance(after, dict):
        found = set()
        for name in {*before, *after}:
            a, b = before.get(name), after.get(name)
            if a != b:
                inner = differences(a, b) if isinstance(a, list) and isinstance(b, list) else set()
                found |= {name + x for x in inner} or {name}
        return found
    return set() if before == after else {""}
