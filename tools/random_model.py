"""Hugging Face directories with random weights, for training from scratch, tests and benchmarks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_brorl.checkpoints import safetensors_files
from megatron_brorl.families.shape import CONFIG, parse_shape
from megatron_brorl.models.weights.names import hf_inits, hf_shapes


def qwen2_config(
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    context: int,
    **special_ids: int | None,
) -> dict[str, Any]:
    """Return the config.json of a Qwen2 model with tied embeddings.

    special_ids: bos_token_id, eos_token_id, pad_token_id.
    """
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "vocab_size": vocab,
        "dtype": "float32",
        **special_ids,
    }


def write_random_model(
    config: dict[str, Any], directory: Path, seed: int, dtype: torch.dtype = torch.float32, defaults: bool = True
) -> int:
    """Write config.json and the weights, and return the number of parameters.

    Linear weights and embeddings are drawn from N(0, initializer_range^2); those that write to the residual stream are
    scaled by 1 / sqrt(2 layers) (Radford et al. 2019, section 2.3). Without `defaults`, norms and biases are drawn
    around 1 and 0, so that a test sees where each of them goes.
    """
    shape = parse_shape(config, str(directory / CONFIG))
    sizes = hf_shapes(shape)
    inits = hf_inits(shape)
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, size: tuple[int, ...]) -> Tensor:
        mean = 1.0 if inits[name] == "ones" else 0.0
        std = shape.init_std
        if inits[name] in ("ones", "zeros") and defaults:
            return torch.full(size, mean)
        if inits[name] == "residual":
            std /= (2 * shape.layers) ** 0.5
        return torch.randn(size, generator=generator).mul_(std).add_(mean)

    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    layout = {name: (size, dtype) for name, size in sizes.items()}
    safetensors_files.write(((name, draw(name, size).to(dtype)) for name, size in sizes.items()), layout, directory)
    return sum(math.prod(size) for size in sizes.values())
