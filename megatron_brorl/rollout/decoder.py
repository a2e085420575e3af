"""A plain decoder for dense Llama, Qwen2 and Qwen3: prefill once per prompt, then one token for all its siblings.

Shapes: L layers, K kv heads, g query heads per kv head, d head size; S prompts in flight, n rows (siblings) per prompt
at most, B rows in all, P prompt tokens at most, W suffix slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, pad, rms_norm, scaled_dot_product_attention, silu

from megatron_brorl.hf_config import ModelShape
from megatron_brorl.ops import rope


@dataclass
class PromptCache:
    """Keys and values of the prompts, stored once and attended by all siblings."""

    keys: list[Tensor]  # L x [S, K, P, d]
    values: list[Tensor]
    hidden: Tensor  # [S, H] at each prompt's last token
    mask: Tensor  # [S, P] additive: 0 on real tokens, -inf on the padding


@dataclass
class Rows:
    """The siblings in flight. Rows of one prompt stand side by side."""

    prompt: Tensor  # [B] index of each row's prompt
    place: Tensor  # [B] index among the rows of its prompt
    widest: int  # most rows of any prompt
    length: Tensor  # [B] prompt tokens of each row
    keys: list[Tensor]  # L x [B, K, W, d]: own suffixes
    values: list[Tensor]

    def keep(self, alive: Tensor) -> Rows:
        """Only the given rows [B'], in order, with their caches."""
        prompt = self.prompt[alive]
        _, counts = prompt.unique_consecutive(return_counts=True)
        starts = (counts.cumsum(0) - counts).repeat_interleave(counts)
        return Rows(
            prompt=prompt,
            place=torch.arange(len(prompt), device=prompt.device) - starts,
            widest=int(counts.max()),
            length=self.length[alive],
            keys=[k.index_select(0, alive) for k in self.keys],
            values=[v.index_select(0, alive) for v in self.values],
        )

    def grow(self, slots: int) -> None:
        """Make room for `slots` suffix tokens per row."""
        extra = slots - self.keys[0].shape[2]
        self.keys = [pad(k, (0, 0, 0, extra)) for k in self.keys]
        self.values = [pad(v, (0, 0, 0, extra)) for v in self.values]


class Decoder:
    """Weights are Hugging Face tensors, with q/k/v and gate/up fused at load."""

    def __init__(self, shape: ModelShape, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype
        self.embedding = weights["model.embed_tokens.weight"].to(dtype)
        self.head = self.embedding if shape.tied else weights["lm_head.weight"].to(dtype)
        self.norm = weights["model.norm.weight"].to(dtype)
        self.layers = [self._layer(weights, f"model.layers.{i}.") for i in range(shape.layers)]
        self.inv_freq, self.rope_factor = rope.inverse_frequencies(shape)
        self.inv_freq = self.inv_freq.to(self.embedding.device)
        self.scale = shape.head_dim**-0.5

    def _layer(self, weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
        def get(*names: str) -> Tensor:
            return torch.cat([weights[prefix + n] for n in names]).to(self.dtype)

        qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        layer = {
            "norm1": get("input_layernorm.weight"),
            "qkv": get(*(f"{n}.weight" for n in qkv)),
            "o": get("self_attn.o_proj.weight"),
            "norm2": get("post_attention_layernorm.weight"),
            "gate_up": get("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            "down": get("mlp.down_proj.weight"),
        }
        if self.shape.qkv_bias:
            layer["qkv_bias"] = get(*(f"{n}.bias" for n in qkv))
        if self.shape.qk_norm:
            layer |= {"q_norm": get("self_attn.q_norm.weight"), "k_norm": get("self_attn.k_norm.weight")}
        return layer

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, H] -> [B, V]."""
        return linear(hidden, self.head)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight.shape, weight, self.shape.norm_eps)

    def _qkv(self, layer: dict[str, Tensor], x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [..., H] -> q [..., heads, d], k and v [..., K, d], rotated."""
        s = self.shape
        qkv = linear(self._norm(x, layer["norm1"]), layer["qkv"], layer.get("qkv_bias"))
        q, k, v = qkv.unflatten(-1, (-1, s.head_dim)).split([s.heads, s.kv_heads, s.kv_heads], dim=-2)
        if s.qk_norm:
            q, k = self._norm(q, layer["q_norm"]), self._norm(k, layer["k_norm"])
        return rope.rotate(q, cos, sin), rope.rotate(k, cos, sin), v

    def _rest(self, layer: dict[str, Tensor], x: Tensor, attended: Tensor) -> Tensor:
        x = x + linear(attended, layer["o"])
        gate, up = linear(self._norm(x, layer["norm2"]), layer["gate_up"]).chunk(2, dim=-1)
        return x + linear(silu(gate) * up, layer["down"])

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = rope.angles(positions, self.inv_freq).unsqueeze(-2)
        return (angle.cos() * self.rope_factor).to(self.dtype), (angle.sin() * self.rope_factor).to(self.dtype)

    def prefill(self, ids: Tensor, lengths: Tensor) -> PromptCache:
        """Compute every prompt once. ids [S, P] right-padded, lengths [S]."""
        rows, width = ids.shape
        positions = torch.arange(width, device=ids.device)
        cos, sin = self._angles(positions)
        x = self.embedding[ids]
        keys, values = [], []
        for layer in self.layers:
            q, k, v = (t.transpose(1, 2) for t in self._qkv(layer, x, cos, sin))
            # Padding stands on the right, so causality alone keeps it away from the real tokens.
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
            x = self._rest(layer, x, out.transpose(1, 2).flatten(-2))
            keys.append(k.contiguous())
            values.append(v.contiguous())
        last = x[torch.arange(rows, device=ids.device), lengths - 1]
        padded = positions.unsqueeze(0) >= lengths.unsqueeze(1)
        mask = torch.zeros(rows, width, dtype=self.dtype, device=ids.device).masked_fill(padded, float("-inf"))
        return PromptCache(keys, values, self._norm(last, self.norm), mask)

    def start(self, cache: PromptCache, counts: list[int], lengths: Tensor, slots: int) -> Rows:
        """counts[s] rows for prompt s, with room for `slots` suffix tokens each."""
        s, device = self.shape, lengths.device
        count = torch.tensor(counts, device=device)
        size = (int(count.sum()), s.kv_heads, slots, s.head_dim)
        prompt = torch.arange(len(counts), device=device).repeat_interleave(count)
        starts = (count.cumsum(0) - count).repeat_interleave(count)
        return Rows(
            prompt=prompt,
            place=torch.arange(size[0], device=device) - starts,
            widest=max(counts),
            length=lengths[prompt],
            keys=[torch.empty(size, dtype=self.dtype, device=device) for _ in self.layers],
            values=[torch.empty(size, dtype=self.dtype, device=device) for _ in self.layers],
        )

    def step(self, cache: PromptCache, rows: Rows, ids: Tensor, slot: int) -> Tensor:
        """Feed each row's newest token ids [B] into suffix slot `slot`; returns the hidden states [B, H] after it."""
        cos, sin = self._angles(rows.length + slot)
        x = self.embedding[ids]
        for i, layer in enumerate(self.layers):
            q, k, v = self._qkv(layer, x, cos, sin)
            rows.keys[i][:, :, slot] = k
            rows.values[i][:, :, slot] = v
            x = self._rest(layer, x, self._attend(cache, rows, i, q, slot + 1))
        return self._norm(x, self.norm)

    def _attend(self, cache: PromptCache, rows: Rows, i: int, q: Tensor, used: int) -> Tensor:
        """q [B, heads, d] over [shared prompt | own suffix] -> [B, heads * d], with one softmax over both."""
        batch, heads, dim = q.shape
        kv = self.shape.kv_heads
        prompts, width = cache.mask.shape
        q = (q * self.scale).view(batch, kv, heads // kv, dim)
        # All siblings of a prompt against its keys at once: [S, K, n * g, d] x [S, K, d, P].
        by_prompt = q.new_zeros(prompts, rows.widest, kv, heads // kv, dim)
        by_prompt[rows.prompt, rows.place] = q
        by_prompt = by_prompt.transpose(1, 2).reshape(prompts, kv, -1, dim)
        shared = by_prompt @ cache.keys[i].transpose(-1, -2) + cache.mask[:, None, None, :]
        shared = shared.view(prompts, kv, rows.widest, heads // kv, width).transpose(1, 2)[rows.prompt, rows.place]
        own = q @ rows.keys[i][:, :, :used].transpose(-1, -2)  # [B, K, g, used]
        weights = torch.cat((shared, own), dim=-1).float().softmax(dim=-1).to(self.dtype)
        on_prompt, on_own = weights.split([width, used], dim=-1)
        spread = q.new_zeros(prompts, rows.widest, kv, heads // kv, width)
        spread[rows.prompt, rows.place] = on_prompt
        spread = spread.transpose(1, 2).reshape(prompts, kv, -1, width)
        out = (spread @ cache.values[i]).view(prompts, kv, rows.widest, heads // kv, dim)
        out = out.transpose(1, 2)[rows.prompt, rows.place] + on_own @ rows.values[i][:, :, :used]
        return out.reshape(batch, heads * dim)
