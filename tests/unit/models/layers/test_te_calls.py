"""Calls of Transformer Engine, which cannot be imported without a GPU.

The calls in models/layers/te.py are parsed and compared with Megatron-Core's signatures.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from pathlib import Path

import pytest
import tiny
import torch
from megatron.core.models.common.embeddings import rope_utils

import megatron_brorl
from megatron_brorl.config.schema import LoraConfig, OptimConfig
from megatron_brorl.families.shape import read_shape
from megatron_brorl.models import gpt
from megatron_brorl.models.layers.attention import Segments
from megatron_brorl.models.layers.lora import ColumnLinear
from megatron_brorl.ops import rope
from megatron_brorl.ops.backend import backend
from megatron_brorl.parallel.packing import PackedGroup
from megatron_brorl.train.worker import StageOptions, Worker

SOURCE = ast.parse((Path(megatron_brorl.__file__).parent / "models" / "layers" / "te.py").read_text(encoding="utf-8"))
EXTENSION = "megatron.core.extensions.transformer_engine"
IMPORTED = {  # module and name by the name in SOURCE
    alias.asname or alias.name: (node.module or "", alias.name)
    for node in ast.walk(SOURCE)
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}


def _wrappers() -> dict[str, ast.ClassDef]:
    """Return the classes of Megatron's Transformer Engine extension, whose import needs Transformer Engine."""
    spec = importlib.util.find_spec(EXTENSION)
    assert spec is not None
    assert spec.origin is not None
    source = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    return {node.name: node for node in ast.walk(source) if isinstance(node, ast.ClassDef)}


def test_every_call_fits_its_signature():
    checked = set()
    for node in ast.walk(SOURCE):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        module, name = IMPORTED.get(node.func.id, ("", ""))
        if module.startswith("megatron.") and module != EXTENSION:
            function = getattr(importlib.import_module(module), name)
            keywords = {k.arg: None for k in node.keywords if k.arg}
            inspect.signature(function).bind_partial(*[None for _ in node.args], **keywords)
            checked.add(name)
    assert checked == {"get_gpt_layer_with_transformer_engine_spec", "TransformerBlockSubmodules"}


def test_boundaries_of_segments_are_made_once():
    """Three segments of 4 tokens and one of 7, counted by hand."""
    segments = Segments(groups=(PackedGroup(0, ((3, 4), (1, 7))),))
    params = segments.variable_length
    for boundaries in (
        params.cu_seqlens_q,
        params.cu_seqlens_kv,
        params.cu_seqlens_q_padded,
        params.cu_seqlens_kv_padded,
    ):
        assert boundaries.dtype == torch.int32
        assert boundaries.tolist() == [0, 4, 8, 12, 19]
    assert (params.max_seqlen_q, params.max_seqlen_kv, params.qkv_format) == (7, 7, "thd")
    assert segments.variable_length is params


def test_attention_call_fits_megatrons_wrapper():
    """The call is super().forward(q, k, v, mask, packed_seq_params=..., **kwargs) of TEDotProductAttention."""
    wrapper = _wrappers()["TEDotProductAttention"]
    forward = next(n for n in wrapper.body if isinstance(n, ast.FunctionDef) and n.name == "forward")
    names = [a.arg for a in forward.args.args]
    assert names[:5] == ["self", "query", "key", "value", "attention_mask"]
    cls = next(n for n in SOURCE.body if isinstance(n, ast.ClassDef) and n.name == "PackedTeAttention")
    calls = [n for n in ast.walk(cls) if isinstance(n, ast.Call) and ast.unparse(n.func) == "super().forward"]
    assert len(calls) == 1
    keywords = {k.arg for k in calls[0].keywords if k.arg}
    assert keywords == {"packed_seq_params"}
    assert keywords <= set(names)


def test_fused_rotation_gets_the_angle_of_every_token(processes, tmp_path, monkeypatch):
    """The fused call rotates row i of [T, 1, heads, d] by row i of the angles, at any position in the stream."""

    def fused(t, freqs, interleaved):  # transformer_engine.pytorch.attention.rope, tensor_format="sbhd"
        assert not interleaved
        x, y = t.chunk(2, dim=-1)
        return t * freqs[: len(t)].cos() + torch.cat((-y, x), dim=-1) * freqs[: len(t)].sin()

    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", fused)
    monkeypatch.setattr(gpt, "uses_te_layers", lambda shape: True)
    tiny.make_model(tmp_path, "qwen2", tied=True)
    shape = read_shape(tmp_path)
    ops = backend("reference", torch.device("cpu"))
    config = gpt.transformer_config(shape, processes, torch.float32, recompute=False, ops=ops)
    positions = torch.tensor([0, 1, 2, 3, 4, 3, 4, 5, 6, 3])  # a prompt of 3 tokens and responses
    inv_freq = rope.inverse_frequencies(shape)[0]
    angles = positions[:, None] * inv_freq
    segments = Segments(groups=(), cos=angles.cos(), sin=angles.sin())
    assert segments.qkv_format != "thd"  # Megatron would otherwise rotate by segments
    x = torch.randn(10, 1, 4, shape.head_dim, generator=torch.Generator().manual_seed(0))
    per_token = rope.angles(positions, inv_freq)[:, None, None, :]
    rotated = rope_utils.apply_rotary_pos_emb(x, per_token, config, cp_group=processes.groups.cp)
    torch.testing.assert_close(rotated.squeeze(1), segments.rotate(x.squeeze(1), 0))


@pytest.mark.parametrize(("optim", "lora"), [(OptimConfig(), None), (OptimConfig(), LoraConfig(rank=2)), (None, None)])
def test_gradients_are_added_to_main_grad_in_the_products_of_trained_weights(
    processes, tmp_path, monkeypatch, optim, lora
):
    monkeypatch.setattr(ColumnLinear, "fuse_wgrad_accumulation", False, raising=False)  # as Transformer Engine's
    tiny.make_model(tmp_path, "qwen2", tied=True)
    options = StageOptions(tokens_per_micro_batch=200, ops=backend("reference", torch.device("cpu")), lora=lora)
    worker = Worker(read_shape(tmp_path), processes, options, optim)
    fused = {layer.fuse_wgrad_accumulation for layer in worker.module.modules() if isinstance(layer, ColumnLinear)}
    assert fused == {optim is not None and lora is None}
