"""Hugging Face directories that tie the LM head to the embedding but also store a head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch
from conversions import to_hf, to_megatron
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from megatron_brorl.checkpoints import convert as conversion
from megatron_brorl.checkpoints import hugging_face
from megatron_brorl.errors import UserError
from megatron_brorl.families.shape import WEIGHTS, read_shape
from megatron_brorl.models.gpt import build_actor, build_critic, critic_body
from megatron_brorl.ops.backend import backend

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def store(directory: Path, embedding, head) -> None:
    tensors = tiny.weights(directory) | {EMBEDDING: embedding, HEAD: head}
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


def set_tied(directory: Path, tied: bool) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": tied}))


@pytest.fixture
def directory(tmp_path):
    """Return a directory whose head differs from its embedding."""
    tiny.make_model(tmp_path / "hf", "qwen2", tied=True)
    embedding = tiny.weights(tmp_path / "hf")[EMBEDDING]
    store(tmp_path / "hf", embedding, torch.randn(embedding.shape, generator=torch.Generator().manual_seed(1)))
    return tmp_path / "hf"


def load(directory: Path, processes) -> torch.nn.Module:
    shape = read_shape(directory)
    actor = build_actor(shape, processes, torch.float32, backend("fused", torch.device("cpu")))
    hugging_face.load(actor, shape, directory)
    return actor


def test_a_different_head_is_refused_and_untying_gives_transformers_logits(directory, processes):
    megatron = directory.parent / "megatron"
    for use in (lambda: load(directory, processes), lambda: to_megatron(directory, megatron, tensor=1, pipeline=1)):
        with pytest.raises(UserError) as caught:
            use()
        assert str(caught.value).startswith(f"{directory}: stores a {HEAD} unlike {EMBEDDING}")
        assert "tie_word_embeddings" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert [p.name for p in directory.parent.iterdir()] == ["hf"]
    # transformers 5 does not tie the head with this config. After the suggested fix, this package has the same model.
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert torch.equal(model.lm_head.weight, tiny.weights(directory)[HEAD])
    assert torch.equal(model.model.embed_tokens.weight, tiny.weights(directory)[EMBEDDING])
    expected = conversion.logits(directory, read_shape(directory))
    set_tied(directory, tied=False)
    to_megatron(directory, megatron, tensor=1, pipeline=1)
    logits = conversion.logits(megatron, read_shape(directory))
    assert float((logits - expected).abs().max()) < 1e-4 * float(expected.abs().max())


@pytest.mark.parametrize("head_is_bf16", [False, True], ids=["bit for bit", "equal values in another type"])
def test_an_equal_head_is_accepted(tmp_path, processes, head_is_bf16):
    tiny.make_model(tmp_path / "hf", "llama", tied=True)
    embedding = tiny.weights(tmp_path / "hf")[EMBEDDING].bfloat16()
    store(tmp_path / "hf", embedding.float(), embedding if head_is_bf16 else embedding.float())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.lm_head.weight is model.model.embed_tokens.weight  # transformers ties them as well
    assert torch.equal(load(tmp_path / "hf", processes).head_weight()[: tiny.VOCAB], embedding.float())
    to_megatron(tmp_path / "hf", tmp_path / "megatron", tensor=1, pipeline=1)
    conversion.verify(tmp_path / "hf", tmp_path / "megatron", read_shape(tmp_path / "hf"))
    to_hf(tmp_path / "megatron", tmp_path / "back")
    assert HEAD not in tiny.weights(tmp_path / "back")


def test_a_head_of_another_shape_is_named(directory, processes):
    store(directory, tiny.weights(directory)[EMBEDDING], torch.zeros(7, 48))
    with pytest.raises(UserError, match=r"lm_head\.weight has shape \[7, 48\], config\.json implies \[103, 48\]"):
        load(directory, processes)


def test_a_critic_ignores_the_head_of_an_untied_model(directory, processes):
    set_tied(directory, tied=False)
    shape = read_shape(directory)
    critic = build_critic(shape, processes, torch.float32, backend("fused", torch.device("cpu")))
    critic_head = ["output_layer.weight"]
    hugging_face.load(critic, critic_body(shape), directory, critic_head)
    assert torch.equal(critic.embedding.word_embeddings.weight[: tiny.VOCAB], tiny.weights(directory)[EMBEDDING])
