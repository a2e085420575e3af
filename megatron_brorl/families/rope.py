"""Rotary embeddings as config.json describes them, with the precedence and the defaults of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_brorl.errors import UserError, shown
from megatron_brorl.families.family import ConfigJson, positive

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
    older = config.get("rope_theta", float, 10000.0)
    theta, scaling = read_rope(config, config.get(key, dict, {}), key, older, SCALINGS)
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
    older = rope.pop("type", None)
    kind = rope.setdefault("rope_type", older or "default")
    _check(config, rope, name, supported)
    if kind == "default":
        return theta, None

    # The context of pretraining may be in three places; transformers uses the first.
    if kind in ("llama3", "yarn"):
        original = config.raw.get(_ORIGINAL) or rope.get(_ORIGINAL)
        rope[_ORIGINAL] = original or config.get("max_position_embeddings", int)
    return theta, rope


def _check(config: ConfigJson, rope: dict[str, Any], name: str, supported: Sequence[str]) -> None:
    """Raise UserError for a key of a rope object that asks for an unsupported rotation."""
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
