"""What training and sampling compute besides layers' matrix products: one interface, chosen once per process.

`backend` is the only place that knows the implementations by name. Everybody else is handed a Backend. Both
implementations give the same results but for rounding; ops.reference defines them, ops.fused is csrc/.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_brorl.algo.advantages import Moments
from megatron_brorl.algo.policy_loss import PolicyLoss, PolicyLossSettings, PolicyTokens
from megatron_brorl.ops.decode import DecodeOps
from megatron_brorl.ops.reference.advantages import GroupKind
from megatron_brorl.ops.reference.value import ValueLoss


class Backend(Protocol):
    """The ops; formulas, shapes and sources are in the docstrings of the functions of these names in ops.reference."""

    @property
    def decode(self) -> DecodeOps:
        """What the built-in rollout engine decodes with."""

    @property
    def fused_layers(self) -> bool:
        """Whether the layers of trained models are those of ops.fused.layers, or Megatron's own."""

    def linear_log_probs(
        self,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        temperature: float,
        group: dist.ProcessGroup | None = None,
        vocab: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """hidden [R, H], weight [V/tp, H], ids [R] -> log-probabilities and entropies [R] in nats, differentiable."""

    def linear_ppo_loss(
        self,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        tokens: PolicyTokens,
        settings: PolicyLossSettings,
        temperature: float,
        group: dist.ProcessGroup | None = None,
        vocab: int | None = None,
    ) -> PolicyLoss:
        """hidden [R, H], weight [V/tp, H], ids [R] -> the policy loss, a scalar; allows one backward pass."""

    def linear_logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """hidden [K, H], weight [V, H] -> logits [K, V] in at least float32, without gradient."""

    def value_loss(
        self, values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, clip: float
    ) -> ValueLoss:
        """The critic's loss of R tokens, all tensors [R]; differentiable in values."""

    def gae(
        self, rewards: Tensor, values: Tensor, starts: Tensor, gamma: float = 1.0, lam: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """rewards and values [T] of segments that begin at starts [S + 1] -> advantages and returns [T]."""

    def group_advantages(self, rewards: Tensor, starts: Tensor, kind: GroupKind = "mean") -> Tensor:
        """rewards [B] of groups that begin at starts [G + 1] -> advantages [B]."""

    def moments(self, values: Tensor) -> Moments:
        """Of a tensor of any shape; waits for the device."""

    def whiten(self, values: Tensor, batch: Moments) -> Tensor:
        """(values - mean) / std of the global batch, of the shape of values, which may be overwritten."""

    def sample_tokens(
        self,
        logits: Tensor,
        keys: Tensor,
        index: Tensor,
        position: Tensor,
        temperature: float,
        top_p: float = 1.0,
        top_k: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """logits [B, V]; keys, index and position [B] int64 -> ids [B] int64 and their log-probabilities [B]."""


def backend(name: str, device: torch.device) -> Backend:
    """Return the ops of config key ops.implementation on a device; "reference" does not load the extension.

    Raises UserError if the extension is needed and does not load, or was built without kernels for the device, and
    ValueError for a name that no implementation has.
    """
    if name == "reference":
        from megatron_brorl.ops.reference.backend import ReferenceBackend

        return ReferenceBackend()
    if name == "fused":
        from megatron_brorl.ops.fused.backend import FusedBackend

        return FusedBackend(device)
    raise ValueError(f'ops.implementation is {name!r}; it takes "reference" or "fused"')
