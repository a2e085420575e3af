"""Qwen2-MoE and Qwen3-MoE: Qwen2 and Qwen3 with a mixture of experts in place of every MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_brorl.errors import UserError
from megatron_brorl.families import dense
from megatron_brorl.families.family import ConfigJson, ModelFamily, Parameter, Requirement, one_rope

ROUTER = Parameter("mlp.router.weight", {"mlp.gate.weight": ("experts", "hidden")}, layout="whole")
# Parameters of one expert, which is on one rank as a whole.
EXPERT_GATE_UP = Parameter(
    "mlp.experts.local_experts.{expert}.linear_fc1.weight",
    {
        "mlp.experts.{expert}.gate_proj.weight": ("ffn", "hidden"),
        "mlp.experts.{expert}.up_proj.weight": ("ffn", "hidden"),
    },
    layout="whole",
)
EXPERT_DOWN = Parameter(
    "mlp.experts.local_experts.{expert}.linear_fc2.weight",
    {"mlp.experts.{expert}.down_proj.weight": ("hidden", "ffn")},
    layout="whole",
    init="residual",
)
# The shared expert of Qwen2-MoE computes every token. Its gate scales its output.
SHARED_GATE_UP = replace(
    dense.GATE_UP,
    megatron="mlp.shared_experts.linear_fc1.weight",
    hf={f"mlp.shared_expert.{name}_proj.weight": ("shared_ffn", "hidden") for name in ("gate", "up")},
)
SHARED_DOWN = replace(
    dense.DOWN,
    megatron="mlp.shared_experts.linear_fc2.weight",
    hf={"mlp.shared_expert.down_proj.weight": ("hidden", "shared_ffn")},
)
SHARED_GATE = Parameter("mlp.shared_experts.gate_weight", {"mlp.shared_expert_gate.weight": ("one", "hidden")}, "whole")


def _rest(config: ConfigJson) -> Mapping[str, Any]:
    """Return the fields of ModelShape that only mixtures of experts have. intermediate_size has no effect."""
    # transformers 5 writes num_local_experts, earlier versions num_experts.
    experts = config.get("num_experts", int, config.get("num_local_experts", int, 128), most=65_536)
    chosen = config.get("num_experts_per_tok", int)
    if chosen > experts:
        raise UserError(f"{config.where}: num_experts_per_tok = {chosen} is more than the {experts} experts")
    norm_topk_prob = config.get("norm_topk_prob", bool)
    if norm_topk_prob and chosen == 1:
        raise UserError(f"{config.where}: norm_topk_prob = true with num_experts_per_tok = 1: the router has no effect")
    return {
        **one_rope(config),
        "ffn": config.get("moe_intermediate_size", int),
        "experts": experts,
        "chosen_experts": chosen,
        "norm_topk_prob": norm_topk_prob,
    }


def _layer(dense_family: ModelFamily, *shared: Parameter) -> tuple[Parameter, ...]:
    """Return a dense family's layer with experts in place of the MLP. shared: parameters of a shared expert."""
    return (
        *(p for p in dense_family.layer if p not in (dense.MLP_NORM, dense.GATE_UP, dense.DOWN)),
        replace(dense.MLP_NORM, fused=""),  # The router needs the normed input, so no linear layer contains the norm.
        ROUTER,
        EXPERT_GATE_UP,
        EXPERT_DOWN,
        *shared,
    )


_EVERY_LAYER = (
    Requirement("mlp_only_layers", ([], None), "every layer must have experts"),
    Requirement("decoder_sparse_step", (1,), "every layer must have experts"),
)
QWEN2_MOE = replace(
    dense.QWEN2,
    name="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    requires=(*dense.QWEN2.requires, *_EVERY_LAYER, Requirement("qkv_bias", (True,), "q, k and v need one")),
    defaults={
        "num_key_value_heads": 16,
        "max_position_embeddings": 32768,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
    },
    rest=lambda config: {**_rest(config), "shared_ffn": config.get("shared_expert_intermediate_size", int)},
    layer=_layer(dense.QWEN2, SHARED_GATE_UP, SHARED_DOWN, SHARED_GATE),
)
QWEN3_MOE = replace(
    dense.QWEN3,
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    requires=(*dense.QWEN3.requires, *_EVERY_LAYER),
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    rest=_rest,
    layer=_layer(dense.QWEN3),
)
