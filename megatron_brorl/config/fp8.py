"""Section [fp8]."""

from __future__ import annotations

from typing import Literal

from megatron_brorl.config.section import key, section


@section
class Fp8Config:
    """Training in FP8 with Transformer Engine, on GPUs that support it."""

    recipe: Literal["none", "delayed", "tensorwise", "blockwise", "mxfp8"] = key(
        "none",
        'Scaling recipe. "tensorwise" scales by the current maximum of a tensor, "delayed" by past maxima, and '
        '"blockwise" per block of 128 x 128. "mxfp8" needs a Blackwell GPU.',
    )
    format: Literal["e4m3", "hybrid"] = key("hybrid", 'FP8 number format. "hybrid" stores gradients in e5m2.')
    parameters: bool = key(False, "Store the weights of linear layers in FP8. The optimizer keeps fp32 weights.")
    bf16_layers: int = key(0, 'Layers at each end of the model that stay in bf16; 0 with recipe = "delayed".', ge=0)
