"""ops.backend.Backend by csrc/. Importing this file loads the extension."""

from __future__ import annotations

from functools import partial

import torch

from megatron_brorl.errors import UserError
from megatron_brorl.ops.decode import DecodeOps
from megatron_brorl.ops.fused import advantages, linear, native, sampling, value
from megatron_brorl.ops.fused.decode import FusedDecode, KernelDecode
from megatron_brorl.ops.fused.head_product import check_fp8


class FusedBackend:
    """csrc's ops where it has kernels for the device."""

    value_loss = staticmethod(value.value_loss)
    gae = staticmethod(advantages.gae)
    group_advantages = staticmethod(advantages.group_advantages)
    moments = staticmethod(advantages.moments)
    whiten = staticmethod(advantages.whiten)
    sample_tokens = staticmethod(sampling.sample_tokens)

    def __init__(self, device: torch.device, fp8: bool = False) -> None:
        """csrc has layers for CPUs alone. fp8: logits by products in FP8 (ops.fused.head_product).

        Raises UserError where csrc was not built for the device, or the device has no such product.
        """
        on_cpu = device.type == "cpu"
        if not on_cpu and not native.CUDA:
            raise UserError(
                'ops.implementation = "fused": the extension was built without CUDA kernels; install again with '
                'BRORL_CUDA=1 and CUDA_HOME set, or set it to "reference"'
            )
        if fp8:
            check_fp8(device)
        self.linear_log_probs = partial(linear.linear_log_probs, fp8=fp8)
        self.linear_ppo_loss = partial(linear.linear_ppo_loss, fp8=fp8)
        self.linear_logits = partial(linear.linear_logits, fp8=fp8)
        self.fused_layers = on_cpu
        self.decode: DecodeOps = FusedDecode() if on_cpu else KernelDecode()
