"""The one table of names: Megatron-Core's GPTModel <-> Hugging Face, for dense Llama, Qwen2 and Qwen3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megatron_brorl.model_shape import ModelShape
from megatron_brorl.reshard.layout import Entry, Layout

# (Megatron, Hugging Face, layout) within one layer; {norms} are named as the layer spec names them.
_LAYER: list[tuple[str, tuple[str, ...], Layout]] = [
    ("{attention_norm}", ("input_layernorm.weight",), "replicated"),
    (
        "self_attention.linear_qkv.weight",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        "qkv",
    ),
    ("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), "columns"),
    ("{mlp_norm}", ("post_attention_layernorm.weight",), "replicated"),
    ("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gate_up"),
    ("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), "columns"),
]
_QKV_BIAS: tuple[str, tuple[str, ...], Layout] = (
    "self_attention.linear_qkv.bias",
    ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "qkv",
)
_QK_NORM: list[tuple[str, tuple[str, ...], Layout]] = [
    ("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), "replicated"),
    ("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), "replicated"),
]
# Transformer Engine fuses each norm into the linear that follows it.
_NORMS = {
    False: {"attention_norm": "input_layernorm.weight", "mlp_norm": "pre_mlp_layernorm.weight"},
    True: {
        "attention_norm": "self_attention.linear_qkv.layer_norm_weight",
        "mlp_norm": "mlp.linear_fc1.layer_norm_weight",
    },
}


def entries(shape: ModelShape, pipeline: int, fused_norms: bool = False) -> list[Entry]:
    """Every parameter of the model once, in Hugging Face order, with the pipeline stage that owns it."""
    shapes = hf_shapes(shape)
    rows = list(_LAYER)
    if shape.qkv_bias:
        rows.insert(2, _QKV_BIAS)
    if shape.qk_norm:
        rows[2:2] = _QK_NORM

    def entry(megatron: str, hf: tuple[str, ...], layout: Layout, stage: int) -> Entry:
        return Entry(megatron, hf, tuple(shapes[name] for name in hf), layout, stage)

    table = [entry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab", 0)]
    for layer in range(shape.layers):
        for megatron, hf, layout in rows:
            name = f"decoder.layers.{layer}.{megatron.format(**_NORMS[fused_norms])}"
            hf_names = tuple(f"model.layers.{layer}.{x}" for x in hf)
            table.append(entry(name, hf_names, layout, layer * pipeline // shape.layers))
    table.append(entry("decoder.final_layernorm.weight", ("model.norm.weight",), "replicated", pipeline - 1))
    if not shape.tied:
        table.append(entry("output_layer.weight", ("lm_head.weight",), "vocab", pipeline - 1))
    return table


def hf_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the Hugging Face checkpoint (a tied lm_head is not one)."""
    q, kv, h = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.hidden
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (h,),
        "self_attn.q_proj.weight": (q, h),
        "self_attn.k_proj.weight": (kv, h),
        "self_attn.v_proj.weight": (kv, h),
        "self_attn.o_proj.weight": (h, q),
        "post_attention_layernorm.weight": (h,),
        "mlp.gate_proj.weight": (shape.ffn, h),
        "mlp.up_proj.weight": (shape.ffn, h),
        "mlp.down_proj.weight": (h, shape.ffn),
    }
    if shape.qkv_bias:
        layer |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
    if shape.qk_norm:
        layer |= {"self_attn.q_norm.weight": (shape.head_dim,), "self_attn.k_norm.weight": (shape.head_dim,)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, h)}
    for i in range(shape.layers):
        shapes |= {f"model.layers.{i}.{name}": s for name, s in layer.items()}
    shapes["model.norm.weight"] = (h,)
    if not shape.tied:
        shapes["lm_head.weight"] = (shape.vocab, h)
    return shapes


def global_parameters(actor: Any) -> Mapping[str, Tensor]:
    """This stage's parameters with global layer numbers (Megatron numbers layers from 0 on every stage)."""
    first = actor.decoder.layers[0].layer_number - 1
    named = {}
    for name, parameter in actor.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(int(parts[2]) + first)
        named[".".join(parts)] = parameter
    return named
