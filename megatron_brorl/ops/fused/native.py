"""Loads the extension built from csrc/; importing this file registers its ops as torch.ops.brorl."""

from __future__ import annotations

from torch import Tensor

from megatron_brorl.errors import UserError

try:
    from megatron_brorl import _C
except ImportError as error:
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
