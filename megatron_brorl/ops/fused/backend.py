"""ops.backend.Backend by csrc/. Importing this file loads the extension."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_brorl.algo.advantage import Moments
from megatron_brorl.errors import UserError
from megatron_brorl.ops.decode import DecodeOps
from megatron_brorl.ops.fused import advantages, linear, native, sampling, value
from megatron_brorl.ops.fused.decode import FusedDecode
from megatron_brorl.ops.reference.decode import ReferenceDecode


class FusedBackend:
    """csrc's ops where it has kernels for the device."""

    linear_log_probs = staticmethod(linear.linear_log_probs)
    linear_ppo_loss = staticmethod(linear.linear_ppo_loss)
    linear_logits = staticmethod(linear.linear_logits)
    value_loss = staticmethod(value.value_loss)
    gae = staticmethod(advantages.gae)
    group_advantages = staticmethod(advantages.group_advantages)
    sample_tokens = staticmethod(sampling.sample_tokens)

    def __init__(self, device: torch.device) -> None:
        """csrc has decoding and layers for CPUs alone. Raises UserError where it was not built for the device."""
        on_cpu = device.type == "cpu"
        if not on_cpu and not native.CUDA:
            raise UserError(
                'ops.implementation = "fused": the extension was built without CUDA kernels; install again with '
                'BRORL_CUDA=1 and CUDA_HOME set, or set it to "reference"'
            )
        self.fused_layers = on_cpu
        self.decode: DecodeOps = FusedDecode() if on_cpu else ReferenceDecode()

    def moments(self, values: Tensor) -> Moments:
        """Of values of any shape; waits for the device."""
        return advantages.to_moments(advantages.moments(values))

    def whiten(self, values: Tensor, batch: Moments) -> Tensor:
        """values of any shape, in place."""
        return advantages.whiten_(values, batch.mean, batch.std)
