"""Tiny random models of each family as Hugging Face directories, made by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
CASES = [(family, tied) for family in FAMILIES for tied in (False, True)]
VOCAB = 103  # not a multiple of any tensor-parallel size


def make_model(directory: Path, family: str, tied: bool, seed: int = 0, std: float = 0.2, **overrides: Any) -> Any:
    """Write a random model whose every parameter (norms and biases too) is away from its default; return it."""
    config_class, model_class = FAMILIES[family]
    config = config_class(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 48,
            "intermediate_size": 88,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 12 if family != "qwen3" else 16,
            "max_position_embeddings": 256,
            "tie_word_embeddings": tied,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "rms_norm_eps": 1e-5,
            **overrides,
        }
    )
    if family == "qwen2":
        del config.head_dim
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(1.0 if "norm" in name else 0.0, std)
    model.save_pretrained(directory)
    return model


def weights(directory: str | Path) -> dict[str, torch.Tensor]:
    """What make_model wrote, by name."""
    return load_file(Path(directory) / "model.safetensors")
