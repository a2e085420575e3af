"""FP8 training: check the machine and the model, and return the settings for Megatron-Core."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import torch
from megatron.core.fp8_utils import get_fp8_align_size
from packaging.version import Version

from megatron_brorl.config.schema import Fp8Config
from megatron_brorl.errors import UserError
from megatron_brorl.families.shape import ModelShape
from megatron_brorl.parallel import cpu_bridge

# Megatron-Core 0.16 asks for 2.9. Megatron-Core 0.19 declares no range.
MIN_TE_VERSION = (2, 9)


def problem(config: Fp8Config, shape: ModelShape, tp_size: int, capability: tuple[int, int], cuda: str, te: str) -> str:
    """Return why the recipe cannot be used and which key to change, or "".

    capability: the GPU's compute capability. cuda, te: versions of CUDA and Transformer Engine. The requirements are
    those of transformer_engine.pytorch.quantization, 2.20.
    """
    gpu = "{}.{}".format(*capability)
    if Version(te).release < MIN_TE_VERSION:
        return f"Transformer Engine {te} is too old: install 2.9 or newer"

    # Each recipe needs a generation of GPUs, and block scaling also a version of CUDA.
    if capability < (8, 9):
        return f"FP8 needs compute capability 8.9 (this GPU: {gpu}): set it to 'none'"
    if config.recipe == "blockwise" and (capability < (9, 0) or Version(cuda).release < (12, 9)):
        return f"block scaling needs compute capability 9.0 and CUDA 12.9 (here: {gpu} and {cuda}): use 'tensorwise'"
    if config.recipe == "mxfp8" and capability < (10, 0):
        return f"MXFP8 needs compute capability 10.0 (this GPU: {gpu}; H100 and H200 have 9.0): use 'blockwise'"

    if 2 * config.bf16_layers >= shape.layers:
        return f"fp8.bf16_layers = {config.bf16_layers} at each end leaves none of the {shape.layers} layers in FP8"

    # Both sides of every weight shard must be multiples of `align`. Tensor parallelism splits all sides but the hidden
    # size. The LM head is not computed in FP8.
    align = get_fp8_align_size(config.recipe)
    widths = {
        "hidden_size": shape.hidden,
        "the query, key and value heads": (shape.heads + 2 * shape.kv_heads) * shape.head_dim // tp_size,
        "the attention heads": shape.heads * shape.head_dim // tp_size,
        "intermediate_size": shape.ffn // tp_size,
    }
    for name, width in widths.items():
        if width % align:
            return f"a rank's part of {name} is {width}, not a multiple of {align}: choose another parallel.tensor"
    return ""


def check(config: Fp8Config, shape: ModelShape, tp_size: int) -> None:
    """Raise UserError if this process cannot train with the configured recipe."""
    if config.recipe == "none":
        return
    where = f'fp8.recipe = "{config.recipe}"'
    if not cpu_bridge.has_transformer_engine():
        raise UserError(f"{where}: needs a GPU and Transformer Engine (the NGC container has it): set it to 'none'")
    capability = torch.cuda.get_device_capability(cpu_bridge.default_device())
    te = metadata.version("transformer-engine")
    why = problem(config, shape, tp_size, capability, torch.version.cuda or "0", te)
    if why:
        raise UserError(f"{where}: {why}")


def settings(config: Fp8Config) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig."""
    if config.recipe == "none":
        return {}
    return {
        "fp8": "hybrid",  # stores gradients in e5m2
        "fp8_recipe": config.recipe,
        "fp8_param": config.parameters,
        "fp8_amax_history_len": 1024,
        "fp8_amax_compute_algo": "max",
        # Data-parallel ranks may have different numbers of micro-batches, so an all-reduce over them would hang.
        "tp_only_amax_red": True,
        "first_last_layers_bf16": config.bf16_layers > 0,
        "num_layers_at_start_in_bf16": config.bf16_layers,
        "num_layers_at_end_in_bf16": config.bf16_layers,
    }
