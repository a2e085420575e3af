"""One pipeline stage of the actor or the critic: Megatron-Core's GPTModel for the model families in families/."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, set_tensor_model_parallel_attributes
from megatron.core.transformer import ModuleSpec, TransformerConfig, TransformerLayer
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor

from megatron_brorl.algo.policy_loss import PolicyLoss, PolicyLossSettings, PolicyTokens
from megatron_brorl.config.schema import LoraConfig
from megatron_brorl.errors import UserError
from megatron_brorl.families.shape import ModelShape
from megatron_brorl.models.layers.attention import PackedAttention, Segments
from megatron_brorl.models.layers.gpu_attention import RepeatedRows
from megatron_brorl.models.layers.lora import ColumnLinear, RowLinear, add_adapters, mlp_submodules
from megatron_brorl.models.layers.norm import PostNormRowLinear, RmsNorm
from megatron_brorl.models.weights.layouts import WeightEntry
from megatron_brorl.models.weights.names import adapter_entries, entries, global_parameters
from megatron_brorl.ops import rope
from megatron_brorl.ops.backend import Backend
from megatron_brorl.ops.interface import compute_dtype
from megatron_brorl.parallel import cpu_bridge
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.parallel.packing import Packed

# By ModelShape.activation. None is SiLU, as in Llama.
_ACTIVATIONS = {None: torch.nn.functional.silu, "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh")}
# Megatron-Core 0.19 logs a warning for every GPTModel. Its successor, HybridModel, supports only Transformer Engine.
logging.getLogger(GPTModel.__module__).addFilter(
    lambda record: not str(record.msg).startswith("GPTModel IS DEPRECATED")
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
# Fields of TransformerConfig that recompute only core attention in the backward pass.
RECOMPUTE_ATTENTION = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}


@dataclass(frozen=True)
class Replay:
    """Given experts of a router's tokens (router replay; Ma et al. 2025, R3).

    Engine and trainer round differently. Where two experts have almost equal scores, their routers choose different
    ones, and the log-probabilities of such tokens differ by much more than rounding. The router calls this class in
    place of Megatron's RouterReplay.
    """

    experts: Tensor  # [tokens, k] int64

    def get_replay_topk(self, scores: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        """Return the experts' scores [tokens, k] from scores [tokens, experts], differentiable, and the experts."""
        return scores.gather(1, self.experts), self.experts


class ReplayLayer(TransformerLayer):
    """A layer whose router takes the experts of Segments.routes [tokens, layers, k]; with None, it chooses them.

    The routes are an argument of the call, so a recomputed call has those of its own micro-batch.
    """

    def forward(self, *args: Any, packed_seq_params: Segments, **kwargs: Any) -> Any:
        routes = packed_seq_params.routes
        self.mlp.router.router_replay = None if routes is None else Replay(routes[:, self.layer_number - 1].long())
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)


class Actor(GPTModel):
    """One pipeline stage of the actor. The last stage returns hidden states instead of logits.

    `Head` applies the LM head only to positions that predict response tokens, so no logits are computed for prompts.
    """

    def __init__(self, shape: ModelShape, config: TransformerConfig, grid: Grid, ops: Backend) -> None:
        fused_layers = ops.fused_layers and shape.is_llama_like
        super().__init__(
            config=config,
            transformer_layer_spec=_layers(shape, config, grid, fused_layers),
            vocab_size=padded_vocab(shape.vocab, grid.tp_size),
            max_sequence_length=shape.context,
            pre_process=grid.pp_rank == 0,
            post_process=grid.last_stage,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="none",  # forward_packed and _preprocess pass the angles of RoPE
            pg_collection=grid.groups,
        )

        self.shape = shape
        self.uses_te = uses_te_layers(shape)
        self.grid = grid
        self.ops = ops

        # Plain tensors instead of buffers, so that they are not saved and stay in float32 when the module is cast.
        self._inv_freq = rope.inverse_frequencies(shape)[0].to(cpu_bridge.default_device())
        if shape.local_layers:
            self._local_inv_freq = rope.inverse_frequencies(shape.of_local_layers)[0].to(cpu_bridge.default_device())

        # A fused linear layer also computes the norm before it. The weight stays the norm's own parameter, so that
        # names and checkpoints are the same with and without fusion. On a GPU, where layers can be from Transformer
        # Engine, ops.fused_layers is false.
        if fused_layers:
            for layer in self.decoder.layers:
                layer.self_attention.linear_qkv.fuse_norm(layer.input_layernorm)
                if not shape.experts:
                    layer.mlp.linear_fc1.fuse_norm(layer.pre_mlp_layernorm)

    def _preprocess(self, input_ids: Tensor, position_ids: Tensor, **kwargs: Any) -> Any:
        """Scale the embeddings (Gemma 3), and give Transformer Engine's layers their rotation angles."""
        prepared = super()._preprocess(input_ids=input_ids, position_ids=position_ids, **kwargs)  # embeddings, angles
        if self.pre_process and self.shape.embedding_scale is not None:
            prepared = (prepared[0] * prepared[0].new_tensor(self.shape.embedding_scale), *prepared[1:])
        if self.pre_process:
            prepared[0].requires_grad_()  # Recomputation needs an input with a gradient, also of frozen embeddings.
        if not self.uses_te:
            return prepared  # layers.attention applies the rotation
        angles = rope.angles(position_ids.reshape(-1), self._frequencies())
        return (prepared[0], angles[:, None, None, :], *prepared[2:])

    def _frequencies(self) -> Tensor:
        return self._inv_freq.to(compute_dtype(self.config.params_dtype))

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        if self.post_process and self.config.sequence_parallel:
            # The loss returns the full gradient on every tensor-parallel rank, so the backward pass splits it.
            return gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return hidden_states

    def forward_packed(self, batch: Packed, ddp: torch.nn.Module | None = None) -> Tensor:
        """Run this stage on a packed stream; the last stage returns hidden states [T, 1, H].

        ddp: Megatron's DistributedDataParallel around this module, if any. It must be called in place of the module.
        """
        # Compute the rotary angles once for all layers. The sliding-window (local) layers of Gemma 3 have their own.
        device = cpu_bridge.default_device()
        positions = batch.position_ids.to(device)
        angles = positions.to(self._frequencies().dtype).unsqueeze(-1) * self._frequencies()

        local = None
        if self.shape.local_layers:
            local_angles = positions.to(angles.dtype).unsqueeze(-1) * self._local_inv_freq.to(angles.dtype)
            local = (local_angles.cos(), local_angles.sin())

        routes = None if batch.routes is None else batch.routes.to(device)
        if routes is not None and self.config.sequence_parallel:
            routes = routes.chunk(self.grid.tp_size)[self.grid.tp_rank]  # like the tokens

        # Only the first stage reads input_ids. Megatron's pipeline passes hidden states to the others.
        return (ddp or self)(
            input_ids=batch.input_ids.to(device).unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            attention_mask=None,  # Segments.groups defines it
            packed_seq_params=Segments(
                groups=batch.groups,
                cos=angles.cos(),
                sin=angles.sin(),
                local=local,
                local_layers=self.shape.local_layers or (),
                cp_group=self.pg_collection.cp if self.grid.cp_size > 1 else None,  # None: segments are not split
                routes=routes,
            ),
        )

    def head_weight(self) -> Tensor:
        """Return this rank's shard [V/tp, H] of the LM head (last stage only)."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def head(self, hidden: Tensor, batch: Packed, temperature: float) -> Head:
        """Return the LM head at the positions that predict response tokens, from hidden [T, 1, H] (last stage only)."""
        return Head(
            hidden=predicting(hidden, batch),
            weight=self.head_weight(),
            targets=batch.targets.to(hidden.device),
            vocab=self.shape.vocab,
            temperature=temperature,
            group=self.pg_collection.tp,
            ops=self.ops,
        )


class ValueHead(MegatronModule):
    """Linear value head: hidden [R, H] -> values [R]. Every tensor-parallel rank computes all values."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        # Megatron expects the last layer of a model to have a matrix of this name.
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size))

    def forward(self, hidden: Tensor) -> Tensor:
        dtype = compute_dtype(hidden.dtype)
        return (hidden.to(dtype) @ self.weight.to(dtype).t()).squeeze(-1)


class Critic(Actor):
    """One pipeline stage of the critic. The value head of the last stage is never tied to the embedding."""

    def __init__(self, shape: ModelShape, config: TransformerConfig, grid: Grid, ops: Backend) -> None:
        super().__init__(replace(shape, tied=False), config, grid, ops)
        if self.post_process:
            self.output_layer = ValueHead(config)

    def values(self, hidden: Tensor, batch: Packed) -> Tensor:
        """Return values [R] at the batch's predicting positions, from hidden [T, 1, H] (last stage only)."""
        return self.output_layer(predicting(hidden, batch))


def predicting(hidden: Tensor, batch: Packed) -> Tensor:
    """Return the hidden states that predict response tokens, [R, H], from hidden [T, 1, H]."""
    # The last token of a shared prompt predicts the first token of all of its responses.
    return RepeatedRows(batch.predict.to(hidden.device), len(hidden)).select(hidden.squeeze(1))


@dataclass(frozen=True)
class Head:
    """The LM head at the positions that predict response tokens. It never holds all logits [R, V] at once."""

    hidden: Tensor  # [R, H] hidden states that predict a response token
    weight: Tensor  # [V/tp, H], this rank's shard of the LM head, padding included
    targets: Tensor  # [R] int64
    vocab: int  # vocabulary size without padding
    temperature: float
    group: dist.ProcessGroup  # tensor-parallel group
    ops: Backend

    def log_probs(self) -> tuple[Tensor, Tensor]:
        """Return the log-probability of each target and the entropy at its position, [R] each, differentiable."""
        return self.ops.linear_log_probs(
            self.hidden, self.weight, self.targets, self.temperature, self.group, self.vocab
        )

    def logits(self, indices: Tensor) -> Tensor:
        """Return logits [K, V] of hidden[indices] at temperature 1, in at least float32. Collective."""
        hidden = self.hidden.index_select(0, indices.to(self.hidden.device))
        part = self.ops.linear_logits(hidden, self.weight)
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, part, group=self.group)
        return torch.cat(parts, dim=-1)[:, : self.vocab]

    def policy_loss(self, tokens: PolicyTokens, settings: PolicyLossSettings) -> PolicyLoss:
        """Return the policy loss of the targets (algo.policy_loss). It supports only one backward pass."""
        return self.ops.linear_ppo_loss(
            self.hidden, self.weight, self.targets, tokens, settings, self.temperature, self.group, self.vocab
        )


def padded_vocab(vocab: int, tp_size: int) -> int:
    """Return the padded vocabulary size, the smallest multiple of tp_size that is at least vocab."""
    return -(-vocab // tp_size) * tp_size


def check_layout(
    shape: ModelShape, tp_size: int, pp_size: int, keys: tuple[str, str] = ("parallel.tensor", "parallel.pipeline")
) -> None:
    """Raise UserError if the model cannot be split over tp_size x pp_size ranks.

    keys: names of the two sizes in the error message.
    """
    # Experts are not split, apart from the shared one.
    ffn = ("shared_expert_intermediate_size", shape.shared_ffn) if shape.experts else ("intermediate_size", shape.ffn)
    for key, value in (("num_attention_heads", shape.heads), ("num_key_value_heads", shape.kv_heads), ffn):
        if value % tp_size:
            raise UserError(f"{keys[0]} = {tp_size} does not divide {key} = {value} of the model")
    if shape.layers % pp_size:
        raise UserError(f"{keys[1]} = {pp_size} does not divide num_hidden_layers = {shape.layers} of the model")


def transformer_config(
    shape: ModelShape,
    grid: Grid,
    dtype: torch.dtype,
    recompute: bool,
    ops: Backend,
    fields: Mapping[str, Any] | None = None,
) -> TransformerConfig:
    """Return Megatron's configuration of the model.

    dtype: dtype of weights and activations. recompute: whether the backward pass recomputes all activations. fields:
    additional fields of TransformerConfig, for example fp8.settings(...) or RECOMPUTE_ATTENTION.
    """
    full_recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    _, rope_factor = rope.inverse_frequencies(shape)
    gpu = cpu_bridge.on_gpu()

    # `fields` cannot override a field silently: Python raises TypeError for a keyword that is given twice.
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        layernorm_zero_centered_gamma=shape.zero_centred_norms,
        qk_layernorm=shape.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        gated_linear_unit=True,
        activation_func=_ACTIVATIONS[shape.activation],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=shape.init_std,
        # YaRN scales queries and keys by a factor. Scaling the attention logits by its square is equivalent.
        softmax_scale=rope_factor**2 * (shape.attention_scale or shape.head_dim**-0.5),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=grid.tp_size,
        pipeline_model_parallel_size=grid.pp_size,
        context_parallel_size=grid.cp_size,
        sequence_parallel=grid.sequence_parallel,
        variable_seq_lengths=True,  # packed streams differ in length
        batch_p2p_sync=False,  # a workaround for old versions of PyTorch, which waits for the device
        moe_token_dispatcher_type="alltoall",  # Megatron checks it even without experts
        calculate_per_token_loss=True,  # sum gradients over ranks: losses are already normalized over the global batch
        use_cpu_initialization=not gpu,
        perform_initialization=False,  # the caller loads all weights
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=uses_te_layers(shape),  # Megatron compiles it, see cpu_bridge.disable_compiler
        # If True, Megatron builds mlp.activation_func as a module of the type that _layers sets.
        use_te_activation_func=ops.fused_layers and shape.is_llama_like and not shape.experts,
        apply_rope_fusion=uses_te_layers(shape),  # by the angles of _preprocess, which are those of every token
        persist_layer_norm=False,
        **(_expert_fields(shape, grid, dtype) if shape.experts else {}),
        **(full_recompute if recompute else {}),
        **(fields or {}),
    )


def _expert_fields(shape: ModelShape, grid: Grid, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "num_moe_experts": shape.experts,
        "moe_ffn_hidden_size": shape.ffn,
        "moe_shared_expert_intermediate_size": shape.shared_ffn or None,
        "moe_shared_expert_gate": shape.shared_ffn > 0,
        "moe_router_topk": shape.chosen_experts,
        "moe_router_pre_softmax": not shape.norm_topk_prob,  # A softmax of the chosen logits divides by their sum.
        "moe_router_dtype": "fp64" if dtype == torch.float64 else "fp32",
        "moe_router_load_balancing_type": "none",  # An auxiliary loss would change the policy gradient.
        "expert_model_parallel_size": grid.ep_size,
        "expert_tensor_parallel_size": 1,
    }


def build_actor(
    shape: ModelShape,
    grid: Grid,
    dtype: torch.dtype,
    ops: Backend,
    recompute: bool = False,
    fields: Mapping[str, Any] | None = None,
    lora: LoraConfig | None = None,
    seed: int = 0,
) -> Actor:
    """Build this rank's stage with uninitialised weights, which the caller loads.

    fields: see transformer_config. lora: add adapters, initialised with `seed`, and freeze the weights.
    """
    check_layout(shape, grid.tp_size, grid.pp_size)
    with cpu_bridge.bridge():
        actor = Actor(shape, transformer_config(shape, grid, dtype, recompute, ops, fields), grid, ops)
    mark_sharded(actor, entries(shape, grid.pp_size, actor.uses_te))
    if lora is not None:
        add_adapters(actor, lora, seed)
        mark_sharded(actor, adapter_entries(shape, grid.pp_size, lora))
    # With several stages, the last one has its own copy of a tied embedding, which `entries` does not list.
    if actor.post_process and not actor.pre_process and shape.tied:
        weight = actor.output_layer.weight
        if not hasattr(weight, "tensor_model_parallel"):  # Megatron-Core 0.19 already sets this for a tied head.
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=0, stride=1)
    return actor.to(device=cpu_bridge.default_device(), dtype=dtype)


def build_critic(
    shape: ModelShape,
    grid: Grid,
    dtype: torch.dtype,
    ops: Backend,
    recompute: bool = False,
    fields: Mapping[str, Any] | None = None,
) -> Critic:
    """Build this rank's stage with an uninitialised body and a value head of zeros. fields: see transformer_config."""
    check_layout(shape, grid.tp_size, grid.pp_size)
    with cpu_bridge.bridge():
        critic = Critic(shape, transformer_config(shape, grid, dtype, recompute, ops, fields), grid, ops)
    mark_sharded(critic, entries(critic_body(shape), grid.pp_size, critic.uses_te))
    return critic.to(device=cpu_bridge.default_device(), dtype=dtype)


def critic_body(shape: ModelShape) -> ModelShape:
    """Return the shape without an LM head, so that loading ignores the head that a directory may hold."""
    return replace(shape, tied=True)


def mark_sharded(model: Actor, table: Sequence[WeightEntry]) -> None:
    """Set Megatron's attributes on the parameters that differ between tensor-parallel ranks, experts included.

    Megatron sets them only when it initialises weights. Without them, its gradient norm would count a parameter as
    replicated and include only the shard of tensor-parallel rank 0.
    """
    parameters = dict(global_parameters(model))
    for entry in table:
        parameter = parameters.get(entry.megatron)
        is_split = entry.layout != "whole" or entry.expert is not None
        if parameter is not None and is_split and not hasattr(parameter, "tensor_model_parallel"):
            # "columns" are the weights of row-parallel linears, which split dim 1 of [out, in]. All others split dim 0.
            dim = int(entry.layout == "columns")
            stride = 1 + int(entry.layout == "gate_up")  # A shard holds a part of gate_proj and a part of up_proj.
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=stride)


def _layers(shape: ModelShape, config: TransformerConfig, grid: Grid, use_fused: bool) -> TransformerBlockSubmodules:
    """Return the layers of this stage: Transformer Engine's, or Megatron's with attention and norms of this package.

    use_fused: use the layers of models.layers.fused. Raises UserError for FP8 without Transformer Engine layers.
    """
    count = get_num_layers_to_build(config, pp_rank=grid.pp_rank)
    if uses_te_layers(shape):
        from megatron_brorl.models.layers import te  # its import fails without CUDA

        return te.layers(shape.qk_norm, count)

    # Only Transformer Engine layers support FP8. Raise instead of training in higher precision.
    if config.fp8:
        raise UserError(
            f'fp8.recipe = "{config.fp8_recipe}": needs layers of Transformer Engine, which this {shape.family} '
            "model cannot use: they need a GPU, Transformer Engine and a Llama-like model"
        )

    spec = get_gpt_layer_local_spec(shape.experts or None, qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    layer = spec.submodules
    attention = layer.self_attention.submodules
    mlp = mlp_submodules(layer)
    norm = RmsNorm
    experts, shared = SequentialMLP, SharedExpertMLP
    attention.core_attention = PackedAttention
    attention.linear_qkv = mlp.linear_fc1 = ColumnLinear
    attention.linear_proj = mlp.linear_fc2 = RowLinear
    if use_fused:
        from megatron_brorl.models.layers import fused  # its import loads the compiled extension

        norm = fused.FusedRmsNorm
        attention.linear_qkv = fused.FusedColumnLinear
        attention.linear_proj = fused.FusedRowLinear
        mlp.linear_fc2 = fused.FusedSwiGluLinear
        if shape.experts:
            experts, shared = fused.FusedExperts, fused.FusedSharedExpert
        else:
            mlp.linear_fc1 = fused.FusedColumnLinear
            mlp.activation_func = fused.PassThroughActivation
        # FusedAttention computes in float32 and does not support segments that are split over ranks.
        if config.context_parallel_size == 1 and config.params_dtype != torch.float64:
            layer.self_attention.module = fused.FusedSelfAttention
            attention.core_attention = fused.FusedAttention
    layer.input_layernorm = layer.pre_mlp_layernorm = norm
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = norm
    if shape.post_norms:
        attention.linear_proj = mlp.linear_fc2 = PostNormRowLinear
    if shape.experts:
        linears = MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear)
        mlp.experts = ModuleSpec(experts, submodules=linears)
        mlp.shared_experts = ModuleSpec(shared, submodules=replace(linears, linear_fc2=mlp.linear_fc2))
        spec.module = ReplayLayer
        # In checkpoints, the norm before the router has its own name, as in a model of Transformer Engine's layers.
        del layer.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    return TransformerBlockSubmodules(layer_specs=[spec] * count, layer_norm=norm)


def uses_te_layers(shape: ModelShape) -> bool:
    """Return whether the layers come from Transformer Engine. It needs a GPU and dense, Llama-like layers."""
    return cpu_bridge.has_transformer_engine() and shape.is_llama_like and not shape.experts
