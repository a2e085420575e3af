"""What a device could do at most: decoding by the speed of its memory, training by its arithmetic."""

from __future__ import annotations

import torch
from bench_common import matrix_weights

from megatron_brorl.model_shape import ModelShape
from megatron_brorl.parallel.flops import peak_of

# Bytes/s of NVIDIA's data sheets, by what the name of a device holds; the first that fits counts.
BANDWIDTH = {
    "GB200": 8.0e12,
    "B200": 8.0e12,
    "H200": 4.8e12,
    "H100 NVL": 3.9e12,
    "H100 PCIe": 2.0e12,
    "H100": 3.35e12,
    "H800": 3.35e12,
    "H20": 4.0e12,
    "A100-SXM4-80GB": 2.039e12,
    "A100": 1.555e12,
    "L40S": 0.864e12,
}


def bandwidth_of(name: str) -> float | None:
    """Bytes per second of the memory of a device of this name; None of one that BANDWIDTH does not have."""
    return next((speed for part, speed in BANDWIDTH.items() if part in name), None)


def token_bytes(shape: ModelShape, itemsize: int) -> int:
    """Bytes of the keys and values of one token in all layers."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * itemsize


def decode_bytes(shape: ModelShape, itemsize: int, prompt: int, n: int, tokens: int) -> int:
    """Bytes that must be read to decode `tokens` tokens of each of n siblings, one token of all at a time.

    At each step: the matrices of the layers and the LM head once, the prompt's keys and values once for all
    siblings, and each sibling's own from the tokens before. Writes, activations and logits are left out, and so is
    computing the prompt: it is a bound from below.
    """
    weights = matrix_weights(shape) * itemsize
    own = n * tokens * (tokens - 1) // 2  # sum over steps of the tokens that a sibling has
    return tokens * weights + token_bytes(shape, itemsize) * (tokens * prompt + own)


def decode_share(
    shape: ModelShape, itemsize: int, sizes: tuple[int, int, int], seconds: float, name: str
) -> float | None:
    """The roofline's seconds over those taken, in [0, 1]; None where nobody knows the device.

    sizes: prompt, n and tokens, as decode_bytes has them.
    """
    speed = bandwidth_of(name)
    return None if speed is None else decode_bytes(shape, itemsize, *sizes) / speed / seconds


def mfu(flops: float, seconds: float, name: str) -> float | None:
    """Model FLOPs utilisation against the dense bf16 peak; None where nobody knows the device."""
    peak = peak_of(name)
    return None if peak is None else flops / seconds / peak


def device_name(device: str) -> str:
    """As CUDA says it; "CPU" without one."""
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"
