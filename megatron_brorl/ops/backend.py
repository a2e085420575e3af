"""The choice of an implementation of the ops, once per process. Other packages receive a Backend as an argument.

ops.reference defines the results in plain torch. ops.fused computes the same, up to rounding, with csrc/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from megatron_brorl.algo.advantages import moments, whiten
from megatron_brorl.ops.reference import advantages, linear, sampling
from megatron_brorl.ops.reference.decode import DecodeOps

if TYPE_CHECKING:  # This import loads the extension.
    from megatron_brorl.ops.fused.backend import FusedBackend


class ReferenceBackend:
    """The ops in plain torch, for any device."""

    fused_layers = False  # whether trained layers use ops.fused.layers instead of Megatron's modules

    linear_log_probs = staticmethod(linear.linear_log_probs)
    linear_ppo_loss = staticmethod(linear.linear_ppo_loss)
    linear_logits = staticmethod(linear.linear_logits)
    value_loss = staticmethod(advantages.value_loss)
    gae = staticmethod(advantages.gae)
    moments = staticmethod(moments)
    whiten = staticmethod(whiten)
    sample_tokens = staticmethod(sampling.sample_tokens)
    decode = DecodeOps()


Backend: TypeAlias = "ReferenceBackend | FusedBackend"


def backend(name: str, device: torch.device) -> Backend:
    """Return the ops of config key ops.implementation on a device; "reference" does not load the extension.

    Raises UserError if the extension is needed and does not load, or was built without kernels for the device, and
    ValueError for a name that no implementation has.
    """
    if name == "reference":
        return ReferenceBackend()
    if name == "fused":
        from megatron_brorl.ops.fused.backend import FusedBackend

        return FusedBackend(device)
    raise ValueError(f'ops.implementation is {name!r}; it takes "reference" or "fused"')
