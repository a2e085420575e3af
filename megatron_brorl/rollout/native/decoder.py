"""A plain decoder for dense Llama, Qwen2 and Qwen3 over paged keys and values.

Shapes: B rows, H hidden size, V vocabulary; pages as in ops.decode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from megatron_brorl.model_shape import ModelShape
from megatron_brorl.ops import rope
from megatron_brorl.ops.decode import PAGE, DecodeOps, HeadNorms, Rows
from megatron_brorl.rollout.native.linear import Linear
from megatron_brorl.rollout.native.pages import PagePool, pages_for


@dataclass(frozen=True)
class _Layer:
    norm1: Tensor
    qkv: Linear
    head_norms: HeadNorms | None
    o: Linear
    norm2: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class Passage:
    """Tokens to compute at once, and where the keys and values of the last of them go."""

    ids: Sequence[int]
    start: int  # tokens before this one are computed but not stored
    pages: Tensor  # for tokens from `start` on, [pages] int32


class Decoder:
    """Weights are Hugging Face tensors, with q/k/v and gate/up fused at load."""

    def __init__(self, shape: ModelShape, weights: Mapping[str, Tensor], dtype: torch.dtype, ops: DecodeOps) -> None:
        self.shape, self.dtype, self.ops = shape, dtype, ops
        self.embedding = weights["model.embed_tokens.weight"].to(dtype)
        self.device = self.embedding.device
        self.head = Linear(self.embedding if shape.tied else weights["lm_head.weight"].to(dtype))
        self.norm = weights["model.norm.weight"].to(dtype)
        self.layers = [self._layer(weights, f"model.layers.{i}.") for i in range(shape.layers)]
        self.inv_freq, self.rope_factor = rope.inverse_frequencies(shape)
        self.inv_freq = self.inv_freq.to(self.device)
        self.scale = shape.head_dim**-0.5

    def _layer(self, weights: Mapping[str, Tensor], prefix: str) -> _Layer:
        def get(*names: str) -> Tensor:
            tensors = [weights[prefix + n] for n in names]
            return (tensors[0] if len(tensors) == 1 else torch.cat(tensors)).to(self.dtype)

        s, qkv = self.shape, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        norms = None
        if s.qk_norm:
            q, k = (weights[f"{prefix}self_attn.{x}_norm.weight"].float() for x in "qk")
            norms = HeadNorms(q, k, s.norm_eps)
        return _Layer(
            norm1=get("input_layernorm.weight"),
            qkv=Linear(get(*(f"{n}.weight" for n in qkv)), get(*(f"{n}.bias" for n in qkv)) if s.qkv_bias else None),
            head_norms=norms,
            o=Linear(get("self_attn.o_proj.weight")),
            norm2=get("post_attention_layernorm.weight"),
            gate_up=Linear(get("mlp.gate_proj.weight", "mlp.up_proj.weight")),
            down=Linear(get("mlp.down_proj.weight")),
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, H] -> [B, V]."""
        return self.head(hidden)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [..., d / 2] float32 of positions [...]."""
        angle = positions.to(self.inv_freq.dtype).unsqueeze(-1) * self.inv_freq
        return angle.cos() * self.rope_factor, angle.sin() * self.rope_factor

    def _through(self, x: Tensor, attend: Any) -> Tensor:
        """x [B, H] through all layers; attend(layer number, layer, qkv) -> [B, heads d]."""
        delta, eps = None, self.shape.norm_eps
        for i, layer in enumerate(self.layers):
            qkv = layer.qkv(self.ops.add_norm(x, delta, layer.norm1, eps))
            delta = layer.o(attend(i, layer, qkv))
            delta = layer.down(self.ops.silu_mul(layer.gate_up(self.ops.add_norm(x, delta, layer.norm2, eps))))
        return self.ops.add_norm(x, delta, self.norm, eps)

    def step(self, pool: PagePool, rows: Rows, ids: Tensor) -> Tensor:
        """Feed each row's newest token [B]; returns the hidden states [B, H] after it."""

        def attend(i: int, layer: _Layer, qkv: Tensor) -> Tensor:
            return self.ops.attend(
                qkv, layer.head_norms, pool.keys[i], pool.values[i], rows, self.scale, self.shape.heads
            )

        return self._through(self.embedding[ids], attend)

    def prefill(self, pool: PagePool, passages: Sequence[Passage]) -> Tensor:
        """Compute passages from their first tokens on; returns the hidden states [passages, H] after their last."""
        s, device = self.shape, self.device
        lengths = torch.tensor([len(p.ids) for p in passages])
        ids = pad_sequence([torch.tensor(p.ids) for p in passages], batch_first=True).to(device)
        batch, width = ids.shape
        cos, sin = (torch.cat((x, x), dim=-1).to(self.dtype) for x in self.angles(torch.arange(width, device=device)))

        def attend(i: int, layer: _Layer, qkv: Tensor) -> Tensor:
            parts = qkv.view(batch, width, -1, s.head_dim).transpose(1, 2)
            q, k, v = parts.split([s.heads, s.kv_heads, s.kv_heads], dim=1)
            if layer.head_norms is not None:
                n = layer.head_norms
                q, k = (
                    torch.nn.functional.rms_norm(x, (s.head_dim,), w.to(x.dtype), n.eps)
                    for x, w in ((q, n.q), (k, n.k))
                )
            q, k = rope.rotate(q, cos, sin), rope.rotate(k, cos, sin)
            for p, key, value in zip(passages, k, v, strict=True):
                _store(pool.keys[i], pool.values[i], p, key, value)
            # Padding stands on the right, so causality alone keeps it away from the real tokens.
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
            return out.transpose(1, 2).reshape(batch * width, -1)

        hidden = self._through(self.embedding[ids.flatten()], attend)
        return hidden[torch.arange(batch) * width + lengths - 1]


def _store(keys: Tensor, values: Tensor, passage: Passage, key: Tensor, value: Tensor) -> None:
    """key and value [K, tokens, d] of a passage to its pages."""
    pages, begin, end = passage.pages.long().to(keys.device), passage.start, len(passage.ids)
    heads, dim = key.shape[0], key.shape[2]
    padded = key.new_zeros(2, heads, pages_for(end - begin) * PAGE, dim)
    padded[0, :, : end - begin], padded[1, :, : end - begin] = key[:, begin:end], value[:, begin:end]
    k, v = padded.unflatten(2, (-1, PAGE)).unbind()  # [K, pages, 16, d]
    keys[pages] = k.permute(1, 0, 3, 2)
    values[pages, :, :, :dim] = v.transpose(0, 1)
