"""ops.backend.Backend in plain torch, for any device."""

from __future__ import annotations

from megatron_brorl.algo.advantages import moments, whiten
from megatron_brorl.ops.reference import advantages, linear, sampling, value
from megatron_brorl.ops.reference.decode import ReferenceDecode


class ReferenceBackend:
    """The definitions, each in a file of this folder or of algo/."""

    fused_layers = False

    linear_log_probs = staticmethod(linear.linear_log_probs)
    linear_ppo_loss = staticmethod(linear.linear_ppo_loss)
    linear_logits = staticmethod(linear.linear_logits)
    value_loss = staticmethod(value.value_loss)
    gae = staticmethod(advantages.gae)
    group_advantages = staticmethod(advantages.group_advantages)
    moments = staticmethod(moments)
    whiten = staticmethod(whiten)
    sample_tokens = staticmethod(sampling.sample_tokens)

    def __init__(self) -> None:
        self.decode = ReferenceDecode()
