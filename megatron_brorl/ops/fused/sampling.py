"""The keyed sampler by csrc/cpu/sample_tokens.*, on CPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_brorl.ops.fused.native import check_devices


def sample_tokens(
    logits: Tensor,
    keys: Tensor,
    index: Tensor,
    position: Tensor,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = 0,
) -> tuple[Tensor, Tensor]:
    """As ops.reference.sampling.sample_tokens, in vocabulary order, but without a copy of the logits or a sort of them.

    logits [B, V] float32 or bfloat16, whose rows may lie apart; keys (63 bits), index and position (32 bits) [B] int64.
    Returns ids [B] int64 and their log-probabilities [B] float32 in nats under the distribution they were drawn from.
    A row depends neither on its neighbours nor on the number of threads. An id can differ from the reference's where
    the uniform falls within float32 rounding of a step of the CDF. -inf masks a token. Raises ValueError for a row with
    NaN or +inf or with nothing above -inf, and for a shape, value or device that does not fit; TypeError for a dtype.
    """
    check_devices("sample_tokens", logits, keys, index, position)
    with torch.no_grad():
        ids, log_probs = torch.ops.brorl.sample_tokens(logits, keys, index, position, temperature, top_p, top_k)
    return ids, log_probs
