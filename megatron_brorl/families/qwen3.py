"""Qwen3: query and key heads are normed, and a head's size does not follow from the hidden size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_brorl.families import dense
from megatron_brorl.families.family import ConfigJson, ModelFamily


def _overrides(config: ConfigJson) -> Mapping[str, Any]:
    return {"head_dim": config.get("head_dim", int, 128, most=65_536)}


FAMILY = ModelFamily(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    requires=(
        dense.SILU,
        dense.FULL_ATTENTION,
        dense.NO_MLP_BIAS,
        dense.UNQUANTISED,
        dense.NO_ATTENTION_BIAS,
        dense.WHOLE_HEAD_ROPE,
    ),
    layer=(
        dense.ATTENTION_NORM,
        dense.QKV,
        dense.Q_NORM,
        dense.K_NORM,
        dense.ATTENTION_OUT,
        dense.MLP_NORM,
        dense.GATE_UP,
        dense.DOWN,
    ),
    embedding=dense.EMBEDDING,
    final_norm=dense.FINAL_NORM,
    head=dense.HEAD,
    overrides=_overrides,
)
