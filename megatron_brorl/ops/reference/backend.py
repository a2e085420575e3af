"""ops.backend.Backend in plain torch, for any device."""

from __future__ import annotations

from functools import partial

from megatron_brorl.algo import advantage
from megatron_brorl.ops.reference import advantages, linear, sampling, value
from megatron_brorl.ops.reference.decode import ReferenceDecode


class ReferenceBackend:
    """The definitions, each in a file of this room or of algo/."""

    fused_layers = False

    value_loss = staticmethod(value.value_loss)
    gae = staticmethod(advantages.gae)
    group_advantages = staticmethod(advantages.group_advantages)
    moments = staticmethod(advantage.moments)
    whiten = staticmethod(advantage.whiten)
    sample_tokens = staticmethod(sampling.sample_tokens)

    def __init__(self, fp8: bool = False) -> None:
        """fp8: the logits are those of FP8, rounded and then multiplied, on any device."""
        self.linear_log_probs = partial(linear.linear_log_probs, fp8=fp8)
        self.linear_ppo_loss = partial(linear.linear_ppo_loss, fp8=fp8)
        self.linear_logits = partial(linear.linear_logits, fp8=fp8)
        self.decode = ReferenceDecode()
