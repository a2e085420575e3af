"""Selection of an implementation of the ops."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_brorl.errors import UserError
from megatron_brorl.ops.backend import backend
from megatron_brorl.ops.fused import native
from megatron_brorl.ops.fused.decode import FlashDecode
from megatron_brorl.ops.reference.decode import DecodeOps

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

WITHOUT_EXTENSION = """
import sys, torch
sys.modules["megatron_brorl._C"] = None  # its import fails
from megatron_brorl.ops.backend import backend
log_probs, _ = backend("reference", torch.device("cpu")).linear_log_probs(
    torch.zeros(2, 3), torch.zeros(4, 3), torch.tensor([0, 3]), 1.0
)
assert torch.allclose(log_probs, torch.tensor(0.25).log())
"""


def test_the_reference_runs_without_the_extension():
    result = subprocess.run([sys.executable, "-c", WITHOUT_EXTENSION], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_loaded_kernels_are_those_of_the_chosen_level():
    """A build for one processor has one module. tools/test_wheel.sh runs this on a wheel, at each level."""
    level_of = {"_C_v4": "x86-64-v4", "_C_v3": "x86-64-v3", "_C": "x86-64"}
    single_levels = ("this processor", f"any {platform.machine()}")
    if len(list(Path(native.__file__).parents[2].glob("_C*.so"))) > 1:
        assert level_of[native.EXTENSION.__name__.rpartition(".")[2]] == native.PROCESSOR
        assert os.environ.get("BRORL_CPU", native.PROCESSOR) == native.PROCESSOR
    else:
        assert native.PROCESSOR in single_levels


def test_an_extension_of_another_torch_is_refused(monkeypatch):
    assert native._load() is native.EXTENSION
    monkeypatch.setattr(native, "torch", SimpleNamespace(__version__="2.6.1+cu124"))
    with pytest.raises(UserError, match=rf"was built for torch {native.EXTENSION.torch}, this is 2\.6\.1\+cu124"):
        native._load()


def test_fused_on_a_gpu_needs_kernels_for_it(monkeypatch):
    monkeypatch.setattr(native, "CUDA", False)
    with pytest.raises(UserError, match="built without CUDA kernels; install again with BRORL_CUDA=1"):
        backend("fused", CUDA)
    assert backend("fused", CPU).fused_layers
    monkeypatch.setattr(native, "CUDA", True)
    on_gpu, plain = backend("fused", CUDA), backend("reference", CUDA)
    assert not on_gpu.fused_layers
    assert (type(on_gpu.decode), type(plain.decode)) == (FlashDecode, DecodeOps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_logits_agree(dtype):
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 24, generator=g).to(dtype) for n in (7, 31))
    expected = hidden.double() @ weight.double().T
    for name in ("fused", "reference"):
        logits = backend(name, CPU).linear_logits(hidden, weight)
        assert logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert (logits.double() - expected).norm() <= 1e-6 * expected.norm()
