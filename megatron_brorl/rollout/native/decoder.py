"""A decoder for the families of families.shape.FAMILIES, with paged keys and values.

Shapes: B rows, H hidden size, V vocabulary; pages as in ops.interface.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, grouped_mm, linear, rms_norm, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from megatron_brorl.families import dense, gemma3, moe
from megatron_brorl.families.family import Parameter
from megatron_brorl.families.shape import ModelShape
from megatron_brorl.ops import rope
from megatron_brorl.ops.interface import DecodeBatch, HeadNorms, RowPages, compute_dtype
from megatron_brorl.ops.reference.decode import DecodeOps
from megatron_brorl.parallel.cpu_bridge import to_device
from megatron_brorl.rollout.native.pages import PagePool

QUERIES = 1024  # queries of a chunk that attend to earlier pages at a time
LAYOUT_ROWS = 512  # the batch size that oneDNN optimises the weight layout for; others work too


class Linear:
    """Compute x weight^T + bias, [B, in] -> [B, out]; on CPUs the weights have oneDNN's own layout.

    oneDNN reads this layout faster, and would otherwise reorder bfloat16 weights on every call. On a CPU a row's result
    does not depend on the other rows.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, product: Callable[[Tensor, Tensor], Tensor] | None = None
    ) -> None:
        """product: computes x [B, in], weight [out, in] -> [B, out] instead of oneDNN and torch."""
        self.bias = bias
        self.product = product
        on_cpu = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
        self.packed = product is None and on_cpu
        if self.packed and weight.dtype == torch.bfloat16:  # Its layout needs AVX-512.
            self.packed = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, LAYOUT_ROWS) if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) == 1 and x.device.type == "cpu":  # One row takes another kernel, which rounds differently.
            return self(x.repeat(2, 1))[:1]
        if self.product is not None:
            return self.product(x, self.weight)
        if not self.packed:
            return linear(x, self.weight, self.bias)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")  # no activation
        return product


@dataclass(frozen=True)
class _Mlp:
    gate_up: Linear  # [B, H] -> [B, 2 ffn]
    down: Linear  # [B, ffn] -> [B, H]


@dataclass(frozen=True)
class _Experts:
    router: Linear  # [B, H] -> [B, experts] float32
    experts: Sequence[_Mlp] | tuple[Tensor, Tensor]  # or stacked: gate_up [experts, 2 ffn, H], down [experts, H, ffn]
    shared: tuple[_Mlp, Linear] | None  # the expert of every row, and its gate [B, H] -> [B, 1]


@dataclass(frozen=True)
class _Layer:
    attention_norm: Tensor  # [H], before attention
    qkv: Linear  # [B, H] -> [B, (heads + 2 kv heads) d]
    head_norms: HeadNorms | None
    attention_out: Linear  # [B, heads d] -> [B, H]
    post_attention_norm: Tensor | None  # [H], after attention
    mlp_norm: Tensor  # [H], before the MLP
    mlp: _Mlp | _Experts
    post_mlp_norm: Tensor | None  # [H], after the MLP
    local: bool  # rotates by Decoder.local_inv_freq


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens to compute in one pass, and the pages for the keys and values of the last ones."""

    ids: Sequence[int]
    store_from: int  # index in `ids` of the first token that is stored; earlier ones are only computed
    pages: Tensor  # for tokens from `store_from` on, [pages] int32
    offset: int  # tokens of the sequence before `ids`, a multiple of the pool's page unless it is contiguous
    before: Tensor  # [n] int32: the pages of the tokens before `ids`


class Decoder:
    """A decoder whose weights are Hugging Face tensors, with q/k/v and gate/up fused at load.

    The model's family lists the tensors of a layer and their Hugging Face names.
    """

    def __init__(self, shape: ModelShape, weights: Mapping[str, Tensor], dtype: torch.dtype, ops: DecodeOps) -> None:
        """weights: every tensor of models.weights.names.hf_shapes, on the device to run on."""
        self.shape = shape
        self.dtype = dtype
        self.ops = ops
        family = shape.model_family

        self.embedding = _fused(weights, "", family.embedding).to(dtype)
        self.device = self.embedding.device
        head = self.embedding if shape.tied else _fused(weights, "", family.head).to(dtype)
        # Rounding to bfloat16 would move a logit of 32 by up to 0.125, and training does not round logits.
        product = ops.linear_logits if dtype == torch.bfloat16 else None
        self.head = Linear(head if product else head.to(compute_dtype(dtype)), product=product)
        scale = shape.embedding_scale
        self.embedding_scale = None if scale is None else self.embedding.new_tensor(scale)
        self.norm = self._scale(_fused(weights, "", family.final_norm)).to(dtype)

        self.layers = [self._layer(weights, f"model.layers.{i}.", i) for i in range(shape.layers)]

        self.inv_freq, self.rope_factor = rope.inverse_frequencies(shape)
        self.inv_freq = self.inv_freq.to(self.device)
        if shape.local_layers:
            self.local_inv_freq = rope.inverse_frequencies(shape.of_local_layers)[0].to(self.device)
        self.scale = shape.attention_scale or shape.head_dim**-0.5
        # Whether a CUDA graph can record a step. torch's grouped products read the rows of each expert on the host, but
        # not in bfloat16 on Hopper or newer.
        grouped = dtype == torch.bfloat16 and self.device.type == "cuda" and torch.cuda.get_device_capability()[0] >= 9
        self.can_be_recorded = ops.contiguous and (not shape.experts or grouped)

    def _scale(self, norm: Tensor) -> Tensor:
        """Return the scale [n] of a norm with this weight [n]."""
        return 1 + norm.float() if self.shape.zero_centred_norms else norm

    def _layer(self, weights: Mapping[str, Tensor], prefix: str, number: int) -> _Layer:
        def find(part: Parameter, expert: int | None = None) -> Tensor | None:
            parameter = self.shape.model_family.find(part)
            return None if parameter is None else _fused(weights, prefix, parameter.of_expert(expert))

        def get(part: Parameter, expert: int | None = None) -> Tensor:
            tensor = find(part, expert)
            assert tensor is not None, f"a family without {part.megatron}"
            return tensor.to(self.dtype)

        def norm(part: Parameter) -> Tensor | None:
            tensor = find(part)
            return None if tensor is None else self._scale(tensor).to(self.dtype)

        def mlp(gate_up: Parameter, down: Parameter, expert: int | None = None) -> _Mlp:
            return _Mlp(Linear(get(gate_up, expert)), Linear(get(down, expert)))

        # Only some families have these parameters.
        bias = find(dense.QKV_BIAS)
        q_norm = find(dense.Q_NORM)
        k_norm = find(dense.K_NORM)
        # The decode ops take float32; prefill casts to its own dtype.
        norms = None
        if q_norm is not None and k_norm is not None:
            norms = HeadNorms(self._scale(q_norm).float(), self._scale(k_norm).float(), self.shape.norm_eps)

        def mixture() -> _Experts:
            experts: Sequence[_Mlp] | tuple[Tensor, Tensor]
            numbers = range(self.shape.experts)
            if self.ops.contiguous:  # In one product for all experts, the host need not know the rows of each.
                gate_up, down = (
                    torch.stack([get(part, e) for e in numbers]) for part in (moe.EXPERT_GATE_UP, moe.EXPERT_DOWN)
                )
                experts = gate_up, down
            else:
                experts = [mlp(moe.EXPERT_GATE_UP, moe.EXPERT_DOWN, e) for e in numbers]
            shared = None
            if self.shape.shared_ffn:
                shared = mlp(moe.SHARED_GATE_UP, moe.SHARED_DOWN), Linear(get(moe.SHARED_GATE))
            return _Experts(Linear(get(moe.ROUTER).float()), experts, shared)

        return _Layer(
            attention_norm=self._scale(get(dense.ATTENTION_NORM)).to(self.dtype),
            qkv=Linear(get(dense.QKV), None if bias is None else bias.to(self.dtype)),
            head_norms=norms,
            attention_out=Linear(get(dense.ATTENTION_OUT)),
            post_attention_norm=norm(gemma3.POST_ATTENTION_NORM),
            mlp_norm=self._scale(get(dense.MLP_NORM)).to(self.dtype),
            mlp=mixture() if self.shape.experts else mlp(dense.GATE_UP, dense.DOWN),
            post_mlp_norm=norm(gemma3.POST_MLP_NORM),
            local=number in (self.shape.local_layers or ()),
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, H] -> [B, V] in the compute dtype."""
        return self.head(hidden.to(self.head.weight.dtype))

    def angles(self, positions: Tensor, local: bool = False) -> tuple[Tensor, Tensor]:
        """Return cos and sin [..., d / 2] float32 of positions [...]; local: for layers of shape.local_layers."""
        inv_freq, factor = (self.local_inv_freq, 1.0) if local else (self.inv_freq, self.rope_factor)
        angle = positions.to(inv_freq.dtype).unsqueeze(-1) * inv_freq
        return angle.cos() * factor, angle.sin() * factor

    def _embed(self, ids: Tensor) -> Tensor:
        """[B] -> [B, H]."""
        x = self.embedding[ids]
        return x if self.embedding_scale is None else x * self.embedding_scale

    def _activate(self, gate_up: Tensor) -> Tensor:
        """[B, 2 ffn] -> [B, ffn]."""
        if self.shape.activation is None:
            return self.ops.silu_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return gelu(gate, approximate="tanh") * up

    def _mlp(self, mlp: _Mlp, x: Tensor) -> Tensor:
        """[B, H] -> [B, H]."""
        return mlp.down(self._activate(mlp.gate_up(x)))

    def _mixture(self, layer: _Experts, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output [B, H] of a mixture of experts for x [B, H], and the experts [B, k] that compute it."""
        # The router computes in float32, as in training. Rounding its logits would change the choice of many tokens.
        weights, chosen = layer.router(x.float()).softmax(-1).topk(self.shape.chosen_experts)
        if self.shape.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)

        # Sorting the pairs of row and expert by expert lets each expert compute its rows in one product.
        by_expert, order = chosen.flatten().sort(stable=True)
        inputs = x[order // chosen.shape[1]]
        if isinstance(layer.experts, tuple):
            gate_up, down = (weight.transpose(1, 2) for weight in layer.experts)
            ends = torch.searchsorted(by_expert, torch.arange(len(gate_up), device=x.device), right=True).int()
            sorted_out = grouped_mm(self._activate(grouped_mm(inputs, gate_up, offs=ends)), down, offs=ends)
        else:
            counts = by_expert.bincount(minlength=len(layer.experts))
            expert_inputs = zip(layer.experts, inputs.split(counts.tolist()), strict=True)
            sorted_out = torch.cat([self._mlp(expert, rows) for expert, rows in expert_inputs if len(rows)])
        out = torch.empty_like(sorted_out)
        out[order] = sorted_out
        mixed = (out.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1).to(x.dtype)
        if layer.shared is not None:
            mlp, gate = layer.shared
            mixed = mixed + self._mlp(mlp, x) * gate(x).sigmoid()
        return mixed, chosen

    def _post(self, x: Tensor, norm: Tensor | None) -> Tensor:
        """Return the output [B, H] of attention or MLP, after its norm if there is one."""
        return x if norm is None else self.ops.add_norm(x, None, norm, self.shape.norm_eps)

    def _layers_forward(self, x: Tensor, attend: Any) -> tuple[Tensor, Tensor | None]:
        """Pass x [B, H] through all layers. attend: (layer number, layer, qkv) -> [B, heads d].

        Returns the hidden states [B, H], and the experts [B, layers, k] of each row if the model has experts.
        """
        routes = []
        delta = None
        eps = self.shape.norm_eps
        for i, layer in enumerate(self.layers):
            qkv = layer.qkv(self.ops.add_norm(x, delta, layer.attention_norm, eps))
            delta = self._post(layer.attention_out(attend(i, layer, qkv)), layer.post_attention_norm)
            normed = self.ops.add_norm(x, delta, layer.mlp_norm, eps)
            if isinstance(layer.mlp, _Experts):
                out, chosen = self._mixture(layer.mlp, normed)
                routes.append(chosen)
            else:
                out = self._mlp(layer.mlp, normed)
            delta = self._post(out, layer.post_mlp_norm)
        return self.ops.add_norm(x, delta, self.norm, eps), torch.stack(routes, dim=1) if routes else None

    def step(self, pool: PagePool, pages: RowPages, ids: Tensor) -> Tensor:
        """Feed each row's newest token [B] and return the hidden states [B, H]."""
        positions = pages.prompt_lengths[pages.prompts] + pages.lengths - 1
        cos, sin = self.angles(positions)
        batch = DecodeBatch(**vars(pages), cos=cos, sin=sin)
        rows = local_rows = self.ops.prepare(batch, pool.page, self.shape.heads // self.shape.kv_heads)
        if self.shape.local_layers:
            cos, sin = self.angles(positions, local=True)
            local_rows = replace(rows, cos=cos, sin=sin)

        def attend(i: int, layer: _Layer, qkv: Tensor) -> Tensor:
            layer_rows = local_rows if layer.local else rows
            return self.ops.attend(qkv, layer.head_norms, pool.keys[i], pool.values[i], layer_rows, self.scale)

        hidden, routes = self._layers_forward(self._embed(ids), attend)
        if routes is not None:
            response_index = rows.lengths - 1
            page = rows.tables.gather(1, (response_index // pool.page).unsqueeze(1)).squeeze(1).long()
            pool.routes[page, response_index % pool.page] = routes.to(pool.routes.dtype)
        return hidden

    def prefill(self, pool: PagePool, chunks: Sequence[PrefillChunk]) -> Tensor:
        """Compute chunks with equally many tokens before each; return the hidden states [chunks, H] at their ends."""
        shape = self.shape
        before = to_device(torch.stack([chunk.before for chunk in chunks]).long(), self.device)  # [chunks, n] pages
        offset = chunks[0].offset

        # Batch the chunks, padded on the right.
        lengths = torch.tensor([len(chunk.ids) for chunk in chunks])
        ids = to_device(pad_sequence([torch.tensor(chunk.ids) for chunk in chunks], batch_first=True), self.device)
        batch, width = ids.shape

        # The tokens that are stored: their indices in the batch, their pages, and their slots in these.
        counts = [len(chunk.ids) - chunk.store_from for chunk in chunks]
        token_index = torch.cat([torch.arange(n) for n in counts])
        first_stored = torch.tensor([i * width + chunk.store_from for i, chunk in enumerate(chunks)])
        stored = token_index + first_stored.repeat_interleave(torch.tensor(counts))
        page = torch.cat([p.pages.long().repeat_interleave(pool.page)[:n] for p, n in zip(chunks, counts, strict=True)])
        stored, page, slot = to_device(torch.stack((stored, page, token_index % pool.page)), self.device)

        # Every chunk starts at the same position, so all share one table of angles.
        positions = torch.arange(offset, offset + width, device=self.device)
        cos_sin = [torch.cat((x, x), dim=-1).to(self.dtype) for x in self.angles(positions)]
        local_cos_sin = cos_sin
        if shape.local_layers:
            local_cos_sin = [torch.cat((x, x), dim=-1).to(self.dtype) for x in self.angles(positions, local=True)]

        def attend(i: int, layer: _Layer, qkv: Tensor) -> Tensor:
            # [B, heads, tokens, d], normed and rotated as in training.
            parts = qkv.view(batch, width, -1, shape.head_dim).transpose(1, 2)
            q, k, v = parts.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
            if layer.head_norms is not None:
                norms = layer.head_norms
                q = rms_norm(q, (shape.head_dim,), norms.q.to(q.dtype), norms.eps)
                k = rms_norm(k, (shape.head_dim,), norms.k.to(k.dtype), norms.eps)

            # Keys are stored after rotation.
            cos, sin = local_cos_sin if layer.local else cos_sin
            q, k = rope.rotate(q, cos, sin), rope.rotate(k, cos, sin)

            pool.store(i, page, slot, *(x.transpose(1, 2).flatten(0, 1)[stored] for x in (k, v)))

            # Padding is on the right, so the causal mask hides it from real tokens.
            if offset:
                k, v = (torch.cat(x, dim=2) for x in zip(pool.load(i, before, offset), (k, v), strict=True))
                out = _prefix_attention(q, k, v, offset, self.scale)
            else:
                out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
            return out.transpose(1, 2).reshape(batch * width, -1)  # [B * tokens, heads d]

        # Only the last hidden state of a chunk is sampled from.
        hidden, routes = self._layers_forward(self._embed(ids.flatten()), attend)
        if routes is not None:
            pool.routes[page, slot] = routes[stored].to(pool.routes.dtype)
        return hidden[to_device(torch.arange(batch) * width + lengths - 1, self.device)]


def _fused(weights: Mapping[str, Tensor], prefix: str, parameter: Parameter) -> Tensor:
    """Return a parameter's Hugging Face tensors as one matrix: q, k and v, or gate and up."""
    tensors = [weights[prefix + name] for name in parameter.hf]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _prefix_attention(q: Tensor, k: Tensor, v: Tensor, offset: int, scale: float) -> Tensor:
    """Return attention of q [B, heads, tokens, d] after `offset` tokens; k and v [B, K, offset + tokens, d].

    Queries are split, because the mask of all of them would be larger than the keys.
    """
    parts = []
    for begin in range(0, q.shape[2], QUERIES):
        queries = q[:, :, begin : begin + QUERIES]
        visible = offset + begin + queries.shape[2]
        mask = torch.ones(queries.shape[2], visible, dtype=torch.bool, device=q.device).tril(offset + begin)
        visible_kv = k[:, :, :visible], v[:, :, :visible]
        parts.append(scaled_dot_product_attention(queries, *visible_kv, mask, scale=scale, enable_gqa=True))
    return torch.cat(parts, dim=2)
