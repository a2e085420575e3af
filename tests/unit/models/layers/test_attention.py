"""Attention over packed streams by the calls of CPUs and GPUs, and te.py's layers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from attention_kernels import kernels_on_cpu, scores  # noqa: F401
from megatron.core.extensions import transformer_engine
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding, apply_rotary_pos_emb

from megatron_brorl.families.shape import parse_shape
from megatron_brorl.models.gpt import transformer_config
from megatron_brorl.models.layers import attention, gpu_attention
from megatron_brorl.models.layers.attention import PackedAttention, Segments
from megatron_brorl.models.layers.lora import Adapter, Adapters
from megatron_brorl.ops import rope
from megatron_brorl.ops.backend import backend
from megatron_brorl.parallel.packing import PackedGroup

STREAMS = {  # PackedGroup(tokens of the prompt, ((segments, tokens of each segment), ...))
    "one token": (PackedGroup(0, ((1, 1),)),),
    "only plain segments": (PackedGroup(0, ((7, 19), (2, 131), (1, 100))),),
    "a prompt": (PackedGroup(7, ((2, 3), (1, 5))),),
    "pieces of other lengths": (PackedGroup(64, ((3, 64), (1, 37))),),
    "prompts and a pad": (
        PackedGroup(40, ((2, 70), (1, 100))),
        PackedGroup(131, ((5, 33),)),
        PackedGroup(0, ((1, 6),)),
    ),
    "plain between prompts": (PackedGroup(4, ((3, 1),)), PackedGroup(0, ((1, 6), (2, 4))), PackedGroup(3, ((1, 2),))),
    "a prompt alone": (PackedGroup(130, ()), PackedGroup(5, ((4, 90), (3, 91)))),
}


def by_definition(groups) -> torch.Tensor:
    """Return the mask [T, T] bool, pair by pair."""
    segments = []  # (tokens, tokens of the prompt)
    start = 0
    for group in groups:
        prompt = range(start, start + group.prefix)
        lengths = [group.prefix, *(n for count, n in group.segments for _ in range(count))]
        for n in lengths:
            segments.append((range(start, start + n), prompt))
            start += n
    mask = torch.zeros(start, start, dtype=torch.bool)
    for tokens, prompt in segments:
        for i in tokens:
            for j in (*tokens, *prompt):
                mask[i, j] = j <= i
    return mask


@pytest.fixture(params=["flash", "efficient", "cpu"])
def kernels(request, monkeypatch):
    """Compute attention by the calls of a GPU, or by those of a CPU."""
    if request.param == "cpu":
        return
    request.getfixturevalue("kernels_on_cpu")
    monkeypatch.setattr(gpu_attention, "supports", lambda query: True)
    monkeypatch.setattr(gpu_attention, "PIECE", 64)
    monkeypatch.setattr(gpu_attention, "_FLASH", (torch.float64, torch.float32) if request.param == "flash" else ())


@pytest.mark.parametrize("groups", STREAMS.values(), ids=STREAMS)
def test_attention_and_its_gradients_agree_with_the_matrix_of_all_scores(kernels, groups):
    mask = by_definition(groups)
    rng = torch.Generator().manual_seed(len(mask))
    q, k, v, grad = (torch.randn(len(mask), heads, 16, dtype=torch.float64, generator=rng) for heads in (6, 2, 2, 6))
    results = []
    for dense in (False, True):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        if dense:
            logits = scores(inputs[0], inputs[1], causal=False, scale=0.3).masked_fill(~mask, -torch.inf)
            out = torch.einsum("hij,jhd->ihd", logits.softmax(-1), inputs[2].repeat_interleave(3, 1))
        else:
            out = attention.attend(*inputs, Segments(groups=groups), 0.3)
        out.backward(grad)
        results.append([out.detach(), *(x.grad for x in inputs)])
    for result, expected in zip(*results, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_attention_to_a_prompt_without_kernels_agrees_with_the_kernels():
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(18, heads, 12, dtype=torch.float64, generator=rng) for heads in (6, 2, 2))
    group = PackedGroup(7, ((2, 3), (1, 5)))
    expected = attention.attend(q, k, v, Segments(groups=(group,)), 0.3)[7:]
    result = attention._causal(q[7:], k[7:], v[7:], group.segments, 0.3, (k[:7], v[:7]))
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


class NoTransformerEngine(torch.nn.Module):
    """Fake of Megatron's wrapper of Transformer Engine's attention; shared prompts need only its configuration."""

    def __init__(self, config, **_):
        super().__init__()
        self.config = config


class Linear(torch.nn.Module):
    """Megatron's wrapper of Transformer Engine's Linear, as far as adapters need it."""

    sequence_parallel = False

    def __init__(self, group, inputs, outputs):
        super().__init__()
        self.tp_group = group
        self.weight = torch.nn.Parameter(torch.randn(outputs, inputs))

    def forward(self, x):
        return x @ self.weight.t(), None


class NormLinear(Linear):
    """Megatron's wrapper of LayerNormLinear, which returns (out, normed) for out if return_layernorm_output is set."""

    def forward(self, x):
        normed = torch.nn.functional.rms_norm(x, x.shape[-1:])
        out, bias = super().forward(normed)
        return (out, normed) if self.return_layernorm_output else out, bias


@pytest.fixture
def te(monkeypatch):
    """The module models/layers/te.py, loaded with fakes, because Transformer Engine cannot be imported."""
    monkeypatch.setattr(transformer_engine, "TEDotProductAttention", NoTransformerEngine)
    monkeypatch.setattr(transformer_engine, "TELayerNormColumnParallelLinear", NormLinear)
    monkeypatch.setattr(transformer_engine, "TERowParallelLinear", Linear)
    path = Path(attention.__file__).with_name("te.py")
    spec = importlib.util.spec_from_file_location("te_without_transformer_engine", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["AdaptedColumnLinear", "AdaptedRowLinear"])
def test_adapters_of_transformer_engine_s_layers_equal_merged_weights(te, processes, name):
    torch.manual_seed(0)
    layer = getattr(te, name)(processes.groups.tp, 6, 5)
    x = torch.randn(7, 1, 6)
    before, _ = layer(x)
    layer.lora = Adapters(5, scaling=1.5)
    layer.lora["up_proj"] = Adapter(torch.randn(2, 6), torch.randn(2, 2), torch.tensor([1, 4]))
    adapted, _ = layer(x)
    assert not torch.allclose(adapted[..., 1], before[..., 1])
    layer.weight = torch.nn.Parameter(layer.lora.merged(layer.weight))
    layer.lora = None
    torch.testing.assert_close(adapted, layer(x)[0])


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("changes", [{}, {"attention_factor": 0.6}, {"mscale": 0.707, "mscale_all_dim": 1.5}])
@pytest.mark.parametrize("with_te", [True, False], ids=["Transformer Engine", "without"])
def test_yarn_scales_attention_as_in_transformers(te, processes, with_te, changes):
    """YaRN's factor on cos and sin is part of the softmax scale."""
    reference = Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rope_parameters=YARN | changes,
    )
    shape = parse_shape(reference.to_dict(), "config.json")
    group = PackedGroup(5, ((2, 3), (1, 4)))
    bounds = [(5, 8), (8, 11), (11, 15)]
    rng = torch.Generator().manual_seed(3)
    q, k, v = (2 * torch.randn(15, heads, 16, generator=rng) for heads in (4, 2, 2))

    # Every response after its prompt, as in transformers: rotation, then softmax(q k / sqrt(d)) v.
    embedding = Qwen2RotaryEmbedding(reference)
    expected = torch.empty(15, 4, 16)
    for begin, end in bounds:
        rows = torch.cat((torch.arange(5), torch.arange(begin, end)))
        cos, sin = embedding(v, torch.arange(len(rows))[None])
        rotated = apply_rotary_pos_emb(*(x[rows].transpose(0, 1)[None] for x in (q, k)), cos, sin)
        query, key = rotated[0][0], rotated[1][0].repeat_interleave(2, 0)
        scores = (query @ key.transpose(1, 2) / 4).masked_fill(torch.ones(len(rows), len(rows)).triu(1) > 0, -torch.inf)
        expected[rows] = (scores.softmax(-1) @ v[rows].transpose(0, 1).repeat_interleave(2, 0)).transpose(0, 1)

    positions = torch.cat((torch.arange(5), *(torch.arange(5, 5 + end - begin) for begin, end in bounds)))
    inv_freq, factor = rope.inverse_frequencies(shape)
    assert abs(factor - 1) > 0.05
    angles = positions[:, None] * inv_freq
    packing = Segments(groups=(group,), cos=angles.cos(), sin=angles.sin())
    config = transformer_config(
        shape, processes, torch.float32, recompute=False, ops=backend("reference", torch.device("cpu"))
    )
    if with_te:  # Megatron rotates the inputs of Transformer Engine's attention
        q, k = packing.rotate(q, 0), packing.rotate(k, 0)
        core = te.PackedTeAttention(config=config)
    else:
        core = PackedAttention(config, softmax_scale=config.softmax_scale)  # as Megatron builds it
    result = core(*(x.unsqueeze(1) for x in (q, k, v)), None, packed_seq_params=packing)
    torch.testing.assert_close(result.view(15, 4, 16), expected, rtol=1e-4, atol=1e-5)
