"""A model family as data: its parameters, its config.json and its differences from Llama.

The trainer, the built-in engine, the converter and tools/random_model.py read it. It imports no torch and no Megatron.
A new family is a ModelFamily in this folder and an entry in families.shape.FAMILIES.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_brorl.errors import UserError, shown

Layout = Literal["replicated", "rows", "columns", "vocab", "qkv", "gate_up"]  # see models.weights.layouts
# q, kv: heads and kv heads times head size; head: one head; ffn: intermediate size.
Dimension = Literal["vocab", "hidden", "q", "kv", "head", "ffn"]
# What a new model begins with. residual: drawn like normal, but writes to the residual stream.
Init = Literal["normal", "residual", "zeros", "ones"]


@dataclass(frozen=True)
class Parameter:
    """One parameter of Megatron's model and the Hugging Face tensors that it is made of."""

    megatron: str  # within its layer, for parameters of a layer
    hf: Mapping[str, tuple[Dimension, ...]]  # name (within its layer too) -> shape
    layout: Layout  # how tensor parallelism cuts it
    init: Init = "normal"
    fused: str = ""  # Megatron's name where Transformer Engine keeps this norm in the linear layer that follows it

    def name(self, fused_norms: bool) -> str:
        """Megatron's name, with or without Transformer Engine's fused norms."""
        return self.fused if fused_norms and self.fused else self.megatron


@dataclass(frozen=True)
class Requirement:
    """A key of config.json that has to have one of these values; where it is missing it counts as the first."""

    key: str
    values: tuple[Any, ...]
    why: str


MOST = 2**31  # of a size
_LARGEST = 1e30  # of a factor; float32 ends at 3.4e38


def positive(value: Any, default: float, where: str) -> float:
    """A number above 0, or `default` for None. Raises UserError, which begins with `where`, for anything else."""
    value = default if value is None else value
    if type(value) not in (int, float) or not 0 < value <= _LARGEST:
        raise UserError(f"{where} = {shown(value)}: must be a number above 0")
    return float(value)


class ConfigJson:
    """The content of a config.json, and the file's name for messages."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def get(self, key: str, kind: type, default: Any = None, most: int = MOST) -> Any:
        """The value of a key, or `default` where it is missing or null.

        Raises UserError unless it is a `kind`: of int, one from 1 to `most`, and of float, a finite one.
        """
        value = self.raw.get(key)
        value = default if value is None else value
        if kind is float and type(value) is int and abs(value) <= MOST:
            value = float(value)
        found: type = type(value)
        if found is not kind:
            raise UserError(f"{self.where}: {key} = {shown(value)}: must be of type {kind.__name__}")
        # Every whole number in there is a size or a count, and every other one a factor.
        if kind is int and value > most:
            raise UserError(f"{self.where}: {key} = {shown(value)}: must be at most {most:,}")
        if kind is float and not abs(value) <= _LARGEST:
            raise UserError(f"{self.where}: {key} = {shown(value)}: must be finite, and within +-{_LARGEST:g}")
        if kind is int and value < 1:
            raise UserError(f"{self.where}: {key} = {shown(value)}: must be at least 1")
        return value

    def require(self, requirement: Requirement) -> None:
        """Raises UserError where a key has a value that is not supported."""
        if self.raw.get(requirement.key, requirement.values[0]) not in requirement.values:
            value = self.raw[requirement.key]
            raise UserError(f"{self.where}: {requirement.key} = {shown(value)} is not supported: {requirement.why}")


@dataclass(frozen=True)
class ModelFamily:
    """What makes a family; all that is not named here is as in Llama."""

    name: str
    architecture: str  # of config.json
    model_type: str  # of config.json; transformers chooses the model's class by it
    requires: tuple[Requirement, ...]
    defaults: Mapping[str, Any]  # values of transformers' configuration class for keys that config.json lacks
    rest: Callable[[ConfigJson], Mapping[str, Any]]  # the fields of ModelShape that families read differently
    layer: tuple[Parameter, ...]  # of each layer, in the order in which they are sent to the engines
    embedding: Parameter
    final_norm: Parameter
    head: Parameter  # not there where the embedding is tied to it

    def find(self, part: Parameter) -> Parameter | None:
        """The layer's parameter that Megatron calls as it calls `part`, or None: Hugging Face's names may differ."""
        return next((p for p in self.layer if p.megatron == part.megatron), None)
