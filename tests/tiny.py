"""Tiny random models of each family, written as Hugging Face directories by transformers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)


@dataclass(frozen=True)
class Family:
    """The classes of a family in transformers."""

    config: Any
    model: Any
    overrides: dict[str, Any] = field(default_factory=dict)  # keys of the configuration that differ from other families


FAMILIES = {
    "llama": Family(LlamaConfig, LlamaForCausalLM),
    "qwen2": Family(Qwen2Config, Qwen2ForCausalLM),
    "qwen3": Family(Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "gemma3": Family(
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "max_position_embeddings": 512,
            "sliding_window": 256,  # limits the context of models with local attention
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
}
# Not in FAMILIES, because a mixture of experts does not support every layout.
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
MIXTURES = {
    "qwen2_moe": Family(
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        {**_EXPERTS, "norm_topk_prob": False, "shared_expert_intermediate_size": 56},
    ),
    "qwen3_moe": Family(Qwen3MoeConfig, Qwen3MoeForCausalLM, {"head_dim": 16, **_EXPERTS}),
}
CASES = [(family, tied) for family in FAMILIES for tied in (False, True)]
VOCAB = 103  # no tensor-parallel size divides it


def make_model(directory: Path, family: str, tied: bool, seed: int = 0, std: float = 0.2, **overrides: Any) -> Any:
    """Write and return a random model. All parameters differ from their defaults, also norms and biases."""
    kind = (FAMILIES | MIXTURES)[family]
    config = kind.config(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 48,
            "intermediate_size": 88,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "max_position_embeddings": 256,
            "tie_word_embeddings": tied,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "rms_norm_eps": 1e-5,
            **kind.overrides,
            **overrides,
        }
    )
    if family in ("qwen2", "qwen2_moe"):
        del config.head_dim  # not a key of these families
    torch.manual_seed(seed)
    model = kind.model(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(float(p.mean().round()), std)  # Norms stay near their default, 1 (0 for Gemma).
    model.save_pretrained(directory)
    return model


def log_probs(model: Any, prompt: Any, response: Any, temperature: float = 1.0) -> torch.Tensor:
    """Return the log-probabilities [G] of a response's tokens, by transformers."""
    ids = torch.tensor([[*map(int, prompt), *map(int, response)]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)[torch.arange(len(response)), ids[0, len(prompt) :]]


def weights(directory: str | Path) -> dict[str, torch.Tensor]:
    """Return the tensors in all safetensors files of a directory, by name."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors
