"""Names, shapes and merged weights of LoRA adapters against PEFT."""

from __future__ import annotations

import pytest
import tiny
from peft import LoraConfig as PeftConfig
from peft import get_peft_model

from megatron_brorl.config.schema import LoraConfig
from megatron_brorl.families.shape import read_shape
from megatron_brorl.models.weights.names import adapter_entries


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("lora", [LoraConfig(rank=3), LoraConfig(rank=5, targets=("v_proj", "down_proj"))])
def test_names_and_shapes_are_peft_s(tmp_path, family, lora):
    model = tiny.make_model(tmp_path, family, tied=True)
    peft = get_peft_model(model, PeftConfig(r=lora.rank, target_modules=list(lora.targets)))
    expected = {n.replace(".default", ""): tuple(p.shape) for n, p in peft.named_parameters() if p.requires_grad}
    entries = adapter_entries(read_shape(tmp_path), 2, lora)
    assert {entry.hf[0]: entry.hf_shapes[0] for entry in entries} == expected
    assert len({entry.megatron for entry in entries}) == len(entries)
    assert [entry.stage for entry in entries] == sorted(entry.stage for entry in entries)
