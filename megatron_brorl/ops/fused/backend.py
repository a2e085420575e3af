"""The ops of csrc/. Importing this module loads the extension."""

from __future__ import annotations

import torch

from megatron_brorl.errors import UserError
from megatron_brorl.ops.fused import advantages, decode, flash_decode, linear, native
from megatron_brorl.ops.interface import DecodeOps


class FusedBackend:
    """The ops of csrc/. On a GPU, decoding and sampling use torch's kernels, because csrc has them for CPUs only."""

    linear_log_probs = staticmethod(linear.linear_log_probs)
    linear_ppo_loss = staticmethod(linear.linear_ppo_loss)
    linear_logits = staticmethod(linear.linear_logits)
    value_loss = staticmethod(advantages.value_loss)
    gae = staticmethod(advantages.gae)
    moments = staticmethod(advantages.moments)
    whiten = staticmethod(advantages.whiten)

    def __init__(self, device: torch.device) -> None:
        """Raise UserError if csrc was not built for the device."""
        on_cpu = device.type == "cpu"
        if not on_cpu and not native.CUDA:
            raise UserError(
                'ops.implementation = "fused": the extension was built without CUDA kernels; install again with '
                'BRORL_CUDA=1 and CUDA_HOME set, or set it to "reference"'
            )
        self.fused_layers = on_cpu
        self.decode: DecodeOps = decode.FusedDecode() if on_cpu else flash_decode.FlashDecode()
        self.sample_tokens = decode.sample_tokens if on_cpu else flash_decode.sample_tokens
