"""Rotary position embeddings: the inverse frequencies of each scaling, and their application.

Su et al. 2021 (RoFormer), eq. 34; "linear": position interpolation (Chen et al. 2023); "yarn": Peng et al. 2023,
sections 3.2 and 3.4; "llama3": the smoothed rescaling of Llama 3.1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron_brorl.errors import UserError, shown
from megatron_brorl.families.shape import ModelShape


def inverse_frequencies(shape: ModelShape) -> tuple[Tensor, float]:
    """Return the frequencies [head_dim / 2] (float32, radians per token) and the factor on cos and sin.

    Raises UserError for a scaling that lacks a key, or whose values give no finite frequencies.
    """
    dim = shape.head_dim
    inv_freq = 1.0 / (shape.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    scaling = shape.rope_scaling
    if scaling is None:
        return inv_freq, 1.0

    # The keys of config.json are not checked one by one. The resulting frequencies are.
    try:
        frequencies, factor = _scaled(inv_freq, dict(scaling), shape)
    except KeyError as e:
        raise UserError(
            f"config.json: rope_scaling of type {shown(scaling['rope_type'])} lacks the key {e.args[0]!r}"
        ) from None
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as e:
        raise UserError(f"config.json: rope_scaling = {shown(dict(scaling))}: {shown(e)}") from None
    if not (math.isfinite(factor) and bool(frequencies.isfinite().all())):
        raise UserError(f"config.json: rope_scaling = {shown(dict(scaling))}: its frequencies are not finite")
    return frequencies, factor


def _scaled(inv_freq: Tensor, scaling: dict[str, Any], shape: ModelShape) -> tuple[Tensor, float]:
    kind = scaling["rope_type"]
    if kind == "linear":
        return inv_freq / float(scaling["factor"]), 1.0
    if kind == "llama3":
        return _llama3(inv_freq, scaling), 1.0
    assert kind == "yarn", kind  # families.family.read_rope refuses all other types
    return _yarn(inv_freq, scaling, shape)


def _llama3(inv_freq: Tensor, s: dict[str, float]) -> Tensor:
    original = s["original_max_position_embeddings"]
    low, high = s["low_freq_factor"], s["high_freq_factor"]
    wavelength = 2 * math.pi / inv_freq
    slow = inv_freq / s["factor"]
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * slow + smooth * inv_freq
    # Long wavelengths are interpolated, short ones keep their frequency, and those in between are blended.
    scaled = torch.where(wavelength > original / low, slow, inv_freq)
    medium = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(medium, blended, scaled)


def _yarn(inv_freq: Tensor, s: dict[str, float], shape: ModelShape) -> tuple[Tensor, float]:
    original = s["original_max_position_embeddings"]
    factor = shape.context / original if s["factor"] is None else s["factor"]

    # sqrt(1 / t) of section 3.4, the factor on cos and sin; 1 if the context is not extended.
    def mscale(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    # The factor is a key, a ratio of two weighted factors, or the paper's formula.
    attention = s.get("attention_factor")
    if attention is None:
        over, under = s.get("mscale"), s.get("mscale_all_dim")
        attention = mscale(factor, over) / mscale(factor, under) if over and under else mscale(factor)

    # The dimension that turns this many times over the original context (section 3.2).
    def dimension(rotations: float) -> float:
        return shape.head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(shape.rope_theta))

    # Dimensions below `low` turn often and keep their frequency. Those above `high` are interpolated. The defaults are
    # the paper's bounds, 32 rotations and 1.
    low, high = dimension(s.get("beta_fast") or 32), dimension(s.get("beta_slow") or 1)
    if s.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, shape.head_dim - 1)

    # A linear ramp in between; its width must not be 0. As in transformers, it is negative if a short context leaves
    # `high` below `low`. Then no dimension is interpolated.
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(shape.head_dim // 2).float() - low) / width).clamp(0, 1)
    return inv_freq / factor * ramp + inv_freq * (1 - ramp), float(attention)


def angles(positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Return rotation angles [..., head_dim] in radians for integer positions [...]; a head's halves share them."""
    half = positions.to(inv_freq.dtype).unsqueeze(-1) * inv_freq
    return torch.cat((half, half), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the (i, i + d/2) pairs of x [..., d] by angles whose cos and sin broadcast against it."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
