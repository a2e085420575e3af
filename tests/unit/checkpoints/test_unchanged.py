"""Whether exported weights are those that a run began with."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from megatron_brorl.checkpoints.unchanged import Comparison


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_number_in_any_tensor(tmp_path, dtype):
    stored = {"a": torch.tensor([1.0, 1 + 2**-20]), "b": torch.arange(6.0).view(2, 3), "c": torch.zeros(2)}
    save_file(stored, tmp_path / "model.safetensors")

    def differs(**changed):
        began_as = Comparison(tmp_path)
        pairs = [(name, changed.get(name, tensor).to(dtype)) for name, tensor in stored.items()]
        assert [name for name, _ in began_as.watch(pairs)] == ["a", "b", "c"]
        return began_as.differs

    assert not differs()
    assert differs(b=stored["b"] + torch.eye(2, 3))
    # What the type that is written cannot hold is no difference.
    assert differs(a=torch.tensor([1.0, 1.0])) == (dtype == torch.float32)
