"""Names of all parameters of a model in Megatron-Core and in Hugging Face checkpoints, from the family's table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from megatron_brorl.config.schema import LoraConfig
from megatron_brorl.families.family import Init, Layout, Parameter
from megatron_brorl.families.shape import ModelShape
from megatron_brorl.models.weights.layouts import WeightEntry


def entries(shape: ModelShape, pp_size: int, te_names: bool = False) -> list[WeightEntry]:
    """Return every parameter once, with the pipeline stage that owns it, in the order of the model.

    te_names: whether norms have the names that Transformer Engine gives them.
    """
    table = []
    for layer, expert, parameter in _parameters(shape):
        hf_prefix = _in_layer("model.layers", layer)

        # Stages have equally many layers. The first also has the embedding, the last the final norm and the head.
        if layer is None:
            stage = 0 if parameter is shape.model_family.embedding else pp_size - 1
        else:
            stage = layer * pp_size // shape.layers

        table.append(
            WeightEntry(
                _in_layer("decoder.layers", layer) + parameter.name(te_names),  # layers are counted over all stages
                tuple(hf_prefix + name for name in parameter.hf),  # several if Megatron has them in one matrix
                tuple(_tensor_shapes(shape, parameter).values()),  # of the whole tensors, not of a rank's part
                parameter.layout,
                stage,
                expert,
            )
        )
    return table


def adapter_entries(shape: ModelShape, pp_size: int, lora: LoraConfig) -> list[WeightEntry]:
    """Return both matrices of every adapter as `entries` does, under the names of PEFT's files."""
    table = []
    for layer, _, parameter in _parameters(shape):
        split_inputs = parameter.layout == "columns"  # a row-parallel layer
        for name, tensor_shape in _tensor_shapes(shape, parameter).items():
            module = name.removesuffix(".weight")
            target = module.rpartition(".")[2]
            if layer is None or target not in lora.targets:
                continue
            megatron = _in_layer("decoder.layers", layer) + parameter.megatron.removesuffix("weight") + "lora." + target
            peft = "base_model.model." + _in_layer("model.layers", layer) + module
            stage = layer * pp_size // shape.layers
            a_shape, b_shape = (lora.rank, tensor_shape[1]), (tensor_shape[0], lora.rank)
            a_layout: Layout = "columns" if split_inputs else "whole"
            b_layout: Layout = "whole" if split_inputs else "rows"
            table.append(WeightEntry(f"{megatron}.a", (f"{peft}.lora_A.weight",), (a_shape,), a_layout, stage))
            table.append(WeightEntry(f"{megatron}.b", (f"{peft}.lora_B.weight",), (b_shape,), b_layout, stage))
    return table


def hf_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of the Hugging Face checkpoint, without a tied lm_head."""
    return {
        _in_layer("model.layers", layer) + name: tensor_shape
        for layer, _, parameter in _parameters(shape)
        for name, tensor_shape in _tensor_shapes(shape, parameter).items()
    }


def hf_inits(shape: ModelShape) -> dict[str, Init]:
    """Return how a new model initialises each tensor of hf_shapes."""
    return {
        _in_layer("model.layers", layer) + name: parameter.init
        for layer, _, parameter in _parameters(shape)
        for name in parameter.hf
    }


def global_parameters(actor: Any) -> Mapping[str, Tensor]:
    """Return this stage's parameters by their global_name."""
    return {global_name(actor, name): parameter for name, parameter in actor.named_parameters()}


def global_name(actor: Any, name: str) -> str:
    """Return the name of a module or parameter with layers and experts counted over all ranks of the model.

    Megatron counts layers per stage and experts per rank.
    """
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"] and len(parts) > 2:
        parts[2] = str(int(parts[2]) + actor.decoder.layers[0].layer_number - 1)
    if "local_experts" in parts[:-1]:
        index = parts.index("local_experts") + 1
        parts[index] = str(int(parts[index]) + actor.grid.ep_rank * (actor.shape.experts // actor.grid.ep_size))
    return ".".join(parts)


def _parameters(shape: ModelShape) -> Iterator[tuple[int | None, int | None, Parameter]]:
    """Yield every parameter with its layer and its expert, which are None outside of layers and experts."""
    family = shape.model_family
    yield None, None, family.embedding
    for layer in range(shape.layers):
        for parameter in family.layer:
            for expert in range(shape.experts) if "{expert}" in parameter.megatron else (None,):
                yield layer, expert, parameter.of_expert(expert)
    yield None, None, family.final_norm
    if not shape.tied:
        yield None, None, family.head


def _tensor_shapes(shape: ModelShape, parameter: Parameter) -> dict[str, tuple[int, ...]]:
    """Return name and shape of the Hugging Face tensors of a parameter."""
    sizes = shape.dimensions
    return {name: tuple(sizes[d] for d in dimensions) for name, dimensions in parameter.hf.items()}


def _in_layer(prefix: str, layer: int | None) -> str:
    return "" if layer is None else f"{prefix}.{layer}."
