"""A model family as data: its parameters, its config.json and its differences from Llama.

The trainer, the built-in engine, the converter and tools/random_model.py read it. It imports no torch and no Megatron.
A new family is a ModelFamily in this folder and an entry in families.shape.FAMILIES.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron_brorl.errors import UserError, shown

Layout = Literal["whole", "rows", "columns", "vocab", "qkv", "gate_up"]  # see models.weights.layouts
# q, kv: heads and kv heads times head size; head: one head; ffn: intermediate size (of an expert if there are any).
Dimension = Literal["one", "vocab", "hidden", "q", "kv", "head", "ffn", "experts", "shared_ffn"]
# Initialization of a new model. residual: like normal, for a matrix that writes to the residual stream.
Init = Literal["normal", "residual", "zeros", "ones"]


@dataclass(frozen=True)
class Parameter:
    """One parameter of Megatron's model and the Hugging Face tensors that it is made of.

    If the names contain {expert}, there is one such parameter for each expert.
    """

    megatron: str  # within its layer, for parameters of a layer
    hf: Mapping[str, tuple[Dimension, ...]]  # name (within its layer too) -> shape
    layout: Layout  # how tensor parallelism cuts it
    init: Init = "normal"
    fused: str = ""  # Megatron's name where Transformer Engine keeps this norm in the linear layer that follows it

    def name(self, te_names: bool) -> str:
        """Return Megatron's name, with or without Transformer Engine's fused norms."""
        return self.fused if te_names and self.fused else self.megatron

    def of_expert(self, expert: int | None) -> Parameter:
        """Return the parameter of one expert, which no tensor parallelism cuts. None: return the parameter itself."""
        if expert is None:
            return self
        hf = {name.format(expert=expert): dimensions for name, dimensions in self.hf.items()}
        return replace(self, megatron=self.megatron.format(expert=expert), hf=hf)


@dataclass(frozen=True)
class Requirement:
    """A key of config.json that must have one of `values`. A missing key counts as the first of them."""

    key: str
    values: tuple[Any, ...]
    why: str


MOST = 2**31  # largest int of a config.json
_LARGEST = 1e30  # largest float of a config.json; float32 ends at 3.4e38


def positive(value: Any, default: float, where: str) -> float:
    """Return a number above 0, or `default` for None. Raises UserError, prefixed by `where`, for anything else."""
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
        """Return the value of a key, or `default` if it is missing or null.

        Raises UserError unless it is a `kind`: an int from 1 to `most`, or a finite float.
        """
        value = self.raw.get(key)
        value = default if value is None else value
        if kind is float and type(value) is int and abs(value) <= MOST:
            value = float(value)
        actual: type = type(value)
        if actual is not kind:
            raise UserError(f"{self.where}: {key} = {shown(value)}: must be of type {kind.__name__}")
        # Every int of a config.json is a size or a count, and every float a factor.
        if kind is int and value > most:
            raise UserError(f"{self.where}: {key} = {shown(value)}: must be at most {most:,}")
        if kind is float and not abs(value) <= _LARGEST:
            raise UserError(f"{self.where}: {key} = {shown(value)}: must be finite, and within +-{_LARGEST:g}")
        if kind is int and value < 1:
            raise UserError(f"{self.where}: {key} = {shown(value)}: must be at least 1")
        return value

    def require(self, requirement: Requirement) -> None:
        """Raise UserError if a key has a value that is not supported."""
        if self.raw.get(requirement.key, requirement.values[0]) not in requirement.values:
            value = self.raw[requirement.key]
            raise UserError(f"{self.where}: {requirement.key} = {shown(value)} is not supported: {requirement.why}")


@dataclass(frozen=True)
class ModelFamily:
    """A model family. Everything that is not listed here is as in Llama."""

    name: str
    architecture: str  # of config.json
    model_type: str  # of config.json; transformers chooses the model's class by it
    requires: tuple[Requirement, ...]
    defaults: Mapping[str, Any]  # values of transformers' configuration class for keys that config.json lacks
    rest: Callable[[ConfigJson], Mapping[str, Any]]  # the fields of ModelShape that families read differently
    layer: tuple[Parameter, ...]  # of each layer, in the order in which they are sent to the engines
    embedding: Parameter
    final_norm: Parameter
    head: Parameter  # absent if it is tied to the embedding

    def find(self, parameter: Parameter) -> Parameter | None:
        """Return the layer's parameter with the same Megatron name, or None. The Hugging Face names may differ."""
        return next((p for p in self.layer if p.megatron == parameter.megatron), None)


SCALINGS = ("default", "linear", "llama3", "yarn")
_ORIGINAL = "original_max_position_embeddings"


def one_rope(config: ConfigJson) -> Mapping[str, Any]:
    """Return the rotation that all layers share, as fields of ModelShape.

    transformers 5 writes one rope_parameters object, earlier versions rope_theta next to rope_scaling. If both are
    present, transformers uses rope_scaling and ignores rope_parameters, its rope_theta included. Raises UserError for
    layers without full attention, and as read_rope does.
    """
    kinds = config.get("layer_types", list, [])
    if any(kind != "full_attention" for kind in kinds):
        raise UserError(f"{config.where}: layer_types = {shown(kinds)} is not supported: only full_attention")
    key = "rope_scaling" if config.get("rope_scaling", dict, {}) else "rope_parameters"
    default_theta = config.get("rope_theta", float, 10000.0)
    theta, scaling = read_rope(config, config.get(key, dict, {}), key, default_theta, SCALINGS)
    return {"rope_theta": theta, "rope_scaling": scaling}


def read_rope(
    config: ConfigJson, rope: Mapping[str, Any], name: str, theta: float, supported: Sequence[str]
) -> tuple[float, Mapping[str, Any] | None]:
    """Return base and scaling of one rope object. The scaling is None for plain RoPE and has a "rope_type" otherwise.

    name: of the object in messages. theta: the default base. Raises UserError for a type outside of `supported`, a
    partial rotation, and nested objects per kind of layer.
    """
    # ModelShape keeps the base apart from the scaling.
    rope = dict(rope)
    theta = positive(rope.pop("rope_theta", None), theta, f"{config.where}: {name}.rope_theta")
    # Earlier versions called the type "type".
    kind_by_old_key = rope.pop("type", None)
    kind = rope.setdefault("rope_type", kind_by_old_key or "default")
    _check(config, rope, name, supported)
    if kind == "default":
        return theta, None

    # The context of pretraining may be in three places; transformers uses the first that is set.
    if kind in ("llama3", "yarn"):
        original = config.raw.get(_ORIGINAL) or rope.get(_ORIGINAL)
        rope[_ORIGINAL] = original or config.get("max_position_embeddings", int)
    return theta, rope


def _check(config: ConfigJson, rope: dict[str, Any], name: str, supported: Sequence[str]) -> None:
    """Raise UserError for a key that asks for an unsupported rotation. Remove partial_rotary_factor from `rope`."""
    kind = rope["rope_type"]
    if not isinstance(kind, str) or kind not in supported:
        raise UserError(
            f"{config.where}: {name}.rope_type = {shown(kind)} is not supported; use {', '.join(supported)}"
        )
    if rope.pop("partial_rotary_factor", None) not in (None, 1.0):
        raise UserError(f"{config.where}: {name}.partial_rotary_factor is not supported: RoPE covers the whole head")
    nested = [key for key, value in rope.items() if isinstance(value, dict)]
    if nested:
        raise UserError(f"{config.where}: {name}.{nested[0]}: a rotation per kind of layer is not supported here")
