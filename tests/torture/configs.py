"""Spoiled configurations: tables, TOML text and overrides."""

from __future__ import annotations

import functools
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torture.mutations import spoil_bytes, spoil_json, value

from megatron_brorl.cli.memory_plan import Machines, micro_batch_tokens
from megatron_brorl.cli.memory_plan import plan_stage as plan
from megatron_brorl.cli.train import batch_line
from megatron_brorl.config.describe import keys
from megatron_brorl.config.load import load
from megatron_brorl.model_shape import ModelShape, parse_shape

EXAMPLES = Path(__file__).parents[2] / "examples"


@functools.cache
def _texts() -> list[str]:
    return [path.read_text() for path in sorted(EXAMPLES.rglob("*.toml"))]


@functools.cache
def _paths() -> list[str]:
    return [key.path for key in keys() if "[" not in key.path]


def config_target(folder: Path, rng: random.Random) -> Callable[[], object]:
    """One of the examples with spoiled bytes, or with overrides of known and unknown keys by values of any type."""
    file, text = folder / "run.toml", rng.choice(_texts())
    overrides = []
    if rng.random() < 0.3:
        file.write_bytes(spoil_bytes(text.encode(), rng))
    else:
        file.write_text(text)
        overrides = [_override(rng) for _ in range(rng.randint(1, 3))]
    return lambda: _whole(file, overrides)


def _whole(file: Path, overrides: list[str]) -> object:
    """The configuration, and everything that is computed from it alone."""
    config = load(file, overrides)
    plan(config, _shape(), Machines(8, 8, gpu=0, here=False))
    return batch_line(config, 64, micro_batch_tokens(config, False), 8, config.parallel.context)


@functools.cache
def _shape() -> ModelShape:
    return parse_shape(
        {
            "architectures": ["Qwen2ForCausalLM"], "hidden_size": 1536, "num_attention_heads": 12,
            "num_key_value_heads": 2, "num_hidden_layers": 28, "intermediate_size": 8960, "vocab_size": 151936,
            "max_position_embeddings": 131072,
        },
        "config.json",
    )  # fmt: skip


def _override(rng: random.Random) -> str:
    if rng.random() < 0.1:
        text = rng.choice(
            ["", "=", "a=b", "rollout=3", "rollout.n", ".=", "rollout.n.m=3", "=rollout.n", "x" * 100_000]
        )
        return str(text)
    key = rng.choice(_paths()) if rng.random() < 0.95 else rng.choice(["rollout.nn", "rolout.n", "a.b", "data.tasks.x"])
    return f"{key}={_toml(rng)}"


def _toml(rng: random.Random) -> str:
    """A value as TOML, or nearly."""
    kind = rng.random()
    if kind < 0.1:
        return rng.choice(["[" * 3000, "9" * 4400, "{" * 500, '"', "1e999", "nan", "-inf", "0x" + "f" * 5000, "\x00"])
    found = value(rng) if kind < 0.7 else spoil_json([1, "a", {"b": 2.0}], rng)
    return _written(found)


def _written(found: Any) -> str:
    if found is None:
        return "null"
    if isinstance(found, float) and not math.isfinite(found):
        return str(found)
    if isinstance(found, dict):
        return "{" + ", ".join(f"{json.dumps(str(k))} = {_written(v)}" for k, v in found.items()) + "}"
    if isinstance(found, list):
        return "[" + ", ".join(map(_written, found)) + "]"
    if type(found) is int and abs(found) > 10**300:
        return "1" + "0" * 400
    return json.dumps(found)
