"""Names and shapes of LoRA adapters against PEFT, and adapters of Transformer Engine's layers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import tiny
import torch
from megatron.core.extensions import transformer_engine
from peft import LoraConfig as PeftConfig
from peft import get_peft_model

from megatron_brorl.config.schema import LoraConfig
from megatron_brorl.families.shape import read_shape
from megatron_brorl.models.layers import lora
from megatron_brorl.models.layers.lora import Adapter, Adapters
from megatron_brorl.models.weights.names import adapter_entries


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("config", [LoraConfig(rank=3), LoraConfig(rank=5, targets=("v_proj", "down_proj"))])
def test_names_and_shapes_are_peft_s(tmp_path, family, config):
    model = tiny.make_model(tmp_path, family, tied=True)
    peft = get_peft_model(model, PeftConfig(r=config.rank, target_modules=list(config.targets)))
    expected = {n.replace(".default", ""): tuple(p.shape) for n, p in peft.named_parameters() if p.requires_grad}
    entries = adapter_entries(read_shape(tmp_path), 2, config)
    assert {entry.hf[0]: entry.hf_shapes[0] for entry in entries} == expected
    assert len({entry.megatron for entry in entries}) == len(entries)
    assert [entry.stage for entry in entries] == sorted(entry.stage for entry in entries)


class Linear(torch.nn.Module):
    """Megatron's wrapper of Transformer Engine's Linear, as far as adapters need it."""

    sequence_parallel = False

    def __init__(self, group, inputs, outputs):
        super().__init__()
        self.tp_group = group
        self.weight = torch.nn.Parameter(torch.randn(outputs, inputs))

    def forward(self, x):
        return x @ self.weight.t(), None


class NormLinear(Linear):
    """Its LayerNormLinear, which returns (out, normed) in place of out if return_layernorm_output is set."""

    def forward(self, x):
        normed = torch.nn.functional.rms_norm(x, x.shape[-1:])
        out, bias = super().forward(normed)
        return (out, normed) if self.return_layernorm_output else out, bias


@pytest.mark.parametrize("name", ["AdaptedColumnLinear", "AdaptedRowLinear"])
def test_layers_of_transformer_engine(monkeypatch, processes, name):
    """The layers of te.py with fakes of Transformer Engine's, against the layer with the merged weight."""
    fakes = {
        "TEDotProductAttention": Linear,
        "TELayerNormColumnParallelLinear": NormLinear,
        "TERowParallelLinear": Linear,
    }
    for wrapper, fake in fakes.items():
        monkeypatch.setattr(transformer_engine, wrapper, fake)
    spec = importlib.util.spec_from_file_location("te_with_fakes", Path(lora.__file__).with_name("te.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    torch.manual_seed(0)
    layer = getattr(module, name)(processes.groups.tp, 6, 5)
    x = torch.randn(7, 1, 6)
    before, _ = layer(x)
    layer.lora = Adapters(5, scaling=1.5)
    layer.lora["up_proj"] = Adapter(torch.randn(2, 6), torch.randn(2, 2), torch.tensor([1, 4]))
    adapted, _ = layer(x)
    assert not torch.allclose(adapted[..., 1], before[..., 1])
    assert torch.equal(adapted[..., [0, 2, 3]], before[..., [0, 2, 3]])
    layer.weight = torch.nn.Parameter(layer.lora.merged(layer.weight))
    layer.lora = None
    torch.testing.assert_close(adapted, layer(x)[0])
