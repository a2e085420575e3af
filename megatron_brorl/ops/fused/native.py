"""Loads the extension built from csrc/; importing this file registers its ops as torch.ops.brorl."""

from __future__ import annotations

import sys
from pathlib import Path

from torch import Tensor

from megatron_brorl.errors import UserError


def _hidden_copy() -> Path | None:
    """The folder of an installed copy that has the extension, where this one, imported in its stead, has none."""
    own = Path(__file__).parents[2]
    folders = [Path(p or ".").resolve() / own.name for p in sys.path]
    built = [p for p in (own, *folders) if any(p.glob("_C.*.so"))]
    return built[0] if built and built[0] != own else None


try:
    from megatron_brorl import _C
except ImportError as error:
    hidden = _hidden_copy()
    if hidden:
        raise UserError(
            f"ops: Python imports megatron_brorl from the sources in {Path(__file__).parents[2]}, which are not built, "
            f"and not the copy installed in {hidden}: start from another folder than the checkout, or install with pip "
            "install --no-build-isolation -e ."
        ) from error
    raise UserError(
        f"ops: the extension megatron_brorl._C does not load ({error}): build it for this Python and torch with "
        'pip install --no-build-isolation -e . (make does it), or set ops.implementation = "reference"'
    ) from error

CUDA: bool = _C.cuda  # whether the extension was built with CUDA kernels (BRORL_CUDA)
BFLOAT16_KERNEL: bool = _C.has_bfloat16_kernel()
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
