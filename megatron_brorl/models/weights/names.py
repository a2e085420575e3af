"""Every parameter of a model under both names, Megatron-Core's and Hugging Face's, from its family's table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from megatron_brorl.families.family import Init, Parameter
from megatron_brorl.families.shape import ModelShape
from megatron_brorl.models.weights.layouts import Entry


def entries(shape: ModelShape, pipeline: int, fused_norms: bool = False) -> list[Entry]:
    """Every parameter of the model once, with the pipeline stage that owns it, in the order of their sending.

    fused_norms: whether norms have the names that Transformer Engine gives them.
    """
    table = []
    for layer, parameter in _parameters(shape):
        of_hf = _in_layer("model.layers", layer)

        # Stages hold equally many layers; the embedding stands before the first, norm and head after the last.
        if layer is None:
            stage = 0 if parameter is shape.model_family.embedding else pipeline - 1
        else:
            stage = layer * pipeline // shape.layers

        table.append(
            Entry(
                _in_layer("decoder.layers", layer) + parameter.name(fused_norms),  # layers are counted over all stages
                tuple(of_hf + name for name in parameter.hf),  # several where Megatron holds them in one matrix
                tuple(_sizes(shape, parameter).values()),  # of the whole tensors, not of a rank's part
                parameter.layout,
                stage,
            )
        )
    return table


def hf_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the Hugging Face checkpoint (a tied lm_head is not one)."""
    return {
        _in_layer("model.layers", layer) + name: size
        for layer, parameter in _parameters(shape)
        for name, size in _sizes(shape, parameter).items()
    }


def hf_inits(shape: ModelShape) -> dict[str, Init]:
    """What each tensor of hf_shapes holds in a new model."""
    return {
        _in_layer("model.layers", layer) + name: parameter.init
        for layer, parameter in _parameters(shape)
        for name in parameter.hf
    }


def global_parameters(actor: Any) -> Mapping[str, Tensor]:
    """This stage's parameters by name, of this rank's shapes, with global layer numbers: Megatron's begin at 0 anew."""
    first = actor.decoder.layers[0].layer_number - 1
    named = {}
    for name, parameter in actor.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(int(parts[2]) + first)
        named[".".join(parts)] = parameter
    return named


def _parameters(shape: ModelShape) -> Iterator[tuple[int | None, Parameter]]:
    """Every parameter with its layer, or None outside of the layers."""
    family = shape.model_family
    yield None, family.embedding
    for layer in range(shape.layers):
        for parameter in family.layer:
            yield layer, parameter
    yield None, family.final_norm
    if not shape.tied:
        yield None, family.head


def _sizes(shape: ModelShape, parameter: Parameter) -> dict[str, tuple[int, ...]]:
    """Name and shape of the Hugging Face tensors of a parameter."""
    of = shape.dimensions
    return {name: tuple(of[d] for d in dimensions) for name, dimensions in parameter.hf.items()}


def _in_layer(prefix: str, layer: int | None) -> str:
    return "" if layer is None else f"{prefix}.{layer}."
