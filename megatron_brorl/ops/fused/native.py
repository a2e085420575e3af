"""Loads the extension built from csrc/; importing this file registers its ops as torch.ops.brorl."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_brorl.errors import UserError
from megatron_brorl.ops.fused import processor


def _hidden_copy() -> Path | None:
    """The folder of an installed copy that has the extension, where this one, imported in its stead, has none."""
    own = processor.PACKAGE
    folders = [Path(p or ".").resolve() / own.name for p in sys.path]
    built = [p for p in (own, *folders) if any(p.glob("_C.*.so"))]
    return built[0] if built and built[0] != own else None


def _load() -> Any:
    """The module of the extension for this processor. Raises UserError where it does not load into this torch."""
    # One set of kernels of those that were built.
    name = processor.chosen(processor.built(), os.environ.get(processor.VARIABLE, ""))
    try:
        found = importlib.import_module(f"megatron_brorl.{name}")
    except ImportError as error:
        # Sources that were not built hide a copy that was: another place to start from is all it takes.
        hidden = _hidden_copy()
        if hidden:
            raise UserError(
                f"ops: Python imports megatron_brorl from the sources in {processor.PACKAGE}, which are not "
                f"built, and not the copy installed in {hidden}: start from another folder than the checkout, or "
                "install with pip install -e ."
            ) from error
        # Or there is none, or one for another Python.
        raise UserError(
            f"ops: the extension megatron_brorl.{name} does not load ({error}): build it for this Python and torch "
            'with pip install . in the checkout (make does it), or set ops.implementation = "reference"'
        ) from error

    # Another release may load, and then read memory that lies otherwise.
    of = getattr(found, "torch", "nobody knows which")  # a build before it was written down
    if torch.__version__.split("+")[0] != of:
        raise UserError(
            f"ops: the extension was built for torch {of}, this is {torch.__version__}: install "
            'megatron-brorl again, or set ops.implementation = "reference"'
        )
    return found


EXTENSION: Any = _load()
CUDA: bool = EXTENSION.cuda  # whether it was built with CUDA kernels (BRORL_CUDA)
PROCESSOR: str = EXTENSION.processor  # what its CPU kernels were built for
BFLOAT16_KERNEL: bool = EXTENSION.has_bfloat16_kernel()
DEVICES = ("cpu", "cuda") if CUDA else ("cpu",)


def check_devices(op: str, *tensors: Tensor | None) -> None:
    """Raise ValueError unless all tensors lie on one device that the extension has kernels for."""
    devices = {x.device for x in tensors if x is not None}
    if len(devices) > 1 or any(d.type not in DEVICES for d in devices):
        built = "CPU and CUDA" if CUDA else "CPU (BRORL_CUDA=0)"
        raise ValueError(
            f"{op}: tensors are on {', '.join(sorted(map(str, devices)))}; all must be on one device, and the "
            f"extension was built for {built}"
        )
