"""Floating-point operations of a model, and the peak rate of a device.

Model FLOPs as in PaLM (Chowdhery et al. 2022, appendix B): a matrix product takes 2 operations per weight and token,
the backward pass twice as many as the forward pass, or as many if the weight is frozen. Recomputation of activations
does not count. Attention counts pairs of tokens that attend to each other, as Megatron-LM does for causal masks. The LM
head counts the predicted tokens. A prompt that a micro-batch stores once counts once.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron_brorl.families.shape import ModelShape
from megatron_brorl.parallel import cpu_bridge
from megatron_brorl.parallel.packing import Packed

# Dense bfloat16 TFLOP/s from NVIDIA's data sheets. The first key that a device's name contains applies.
PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200 NVL": 835.5,
    "H200": 989.4,
    "H100 NVL": 835.5,
    "H100 PCIe": 756.5,
    "H100": 989.4,
    "H800": 989.4,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
}


def layer_weights(shape: ModelShape) -> int:
    """Return the number of weights of all layers' matrices that a token is multiplied with."""
    size = shape.dimensions
    attention = 2 * shape.hidden * (size["q"] + size["kv"])  # queries and output, keys and values
    mlps = 3 * shape.hidden * (shape.ffn * (shape.chosen_experts if shape.experts else 1) + shape.shared_ffn)
    routers = shape.hidden * (shape.experts + (shape.shared_ffn > 0))  # and the gate of a shared expert
    return shape.layers * (attention + routers + mlps)


def pair_flops(shape: ModelShape) -> int:
    """Return the operations between two tokens in a forward pass: scores and their product with the values."""
    return 4 * shape.layers * shape.dimensions["q"]


def forward_flops(shape: ModelShape, batches: Iterable[Packed], outputs: int, adapters: int = 0) -> float:
    """Return the operations of a forward pass over micro-batches on all ranks of a replica, padding included.

    outputs: values that the head computes per predicted token: the size of the vocabulary, or 1 for a critic. adapters:
    number of weights of LoRA adapters.
    """
    tokens, predicted, pairs = _count(batches)
    weights = layer_weights(shape) + adapters
    return 2.0 * (weights * tokens + shape.hidden * outputs * predicted) + pair_flops(shape) * pairs


def training_flops(shape: ModelShape, batches: Iterable[Packed], outputs: int, adapters: int = 0) -> float:
    """Return the operations of a forward and a backward pass, see forward_flops. With adapters, only these train."""
    batches = list(batches)
    tokens, predicted, _ = _count(batches)
    gradients_of_frozen = 2.0 * (layer_weights(shape) * tokens + shape.hidden * outputs * predicted)
    return 3 * forward_flops(shape, batches, outputs, adapters) - (gradients_of_frozen if adapters else 0)


def _count(batches: Iterable[Packed]) -> tuple[int, int, float]:
    """Return the number of tokens, of predicted tokens, and of pairs of tokens in attention."""
    tokens = 0
    predicted = 0
    pairs = 0.0
    for batch in batches:
        if not batch.rows:
            continue  # a dummy for the collectives
        predicted += int(batch.counts.sum())
        for group in batch.groups:
            tokens += group.prefix + sum(count * n for count, n in group.segments)
            pairs += group.prefix * (group.prefix + 1) // 2
            pairs += sum(count * n * (group.prefix + (n + 1) / 2) for count, n in group.segments)
    return tokens, predicted, pairs


def peak_flops() -> float | None:
    """Return the peak operations per second of this process's device; None if it is unknown, as on a CPU."""
    return peak_of(torch.cuda.get_device_name()) if cpu_bridge.on_gpu() else None


def peak_of(name: str) -> float | None:
    """Return the peak operations per second of a device by its name; None if PEAK_TFLOPS lacks it."""
    return next((1e12 * tflops for part, tflops in PEAK_TFLOPS.items() if part in name), None)
