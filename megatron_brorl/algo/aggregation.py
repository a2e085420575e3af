"""How the losses of tokens become the loss of a batch: one weight per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Aggregation = Literal["token_mean", "sequence_mean", "fixed"]


def token_weights(
    lengths: Sequence[int], aggregation: Aggregation, tokens: float, sequences: float, fixed: float = 0.0
) -> list[float]:
    """The weight of every token of each sequence in the loss of the global batch.

    lengths: live tokens of this rank's sequences; tokens, sequences: of the global batch. token_mean: mean over tokens
    (DAPO, section 3.3). sequence_mean: mean over sequences of their token means (GRPO). fixed: sum over tokens divided
    by `fixed` tokens per sequence, so that no sequence's length changes another's weight (Dr. GRPO, Liu et al. 2025).
    """
    if aggregation == "token_mean":
        return [1 / tokens if tokens else 0.0] * len(lengths)
    if aggregation == "sequence_mean":
        return [1 / (n * sequences) if n else 0.0 for n in lengths]
    return [1 / (fixed * sequences)] * len(lengths)
