"""Do engines draw the same random numbers? Rollouts of one prompt that agree although chance forbids it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_brorl.rollout.engine import Request
from megatron_brorl.types import Rollout

# Responses of a lower log-probability than this are looked at: two independent rollouts are the same one with a
# probability below e^-40 = 4e-18 a pair, 1e-12 among all pairs of 512.
LEAST_NATS = 40.0


def improbable(requests: Sequence[Request], rollouts: Sequence[Sequence[Rollout]]) -> tuple[Tensor, list[str]]:
    """Hashes [K] int64 of (prompt, tokens) of every rollout too improbable to come twice, and its name.

    rollouts: of each request. Equal hashes, on whatever ranks and in whatever groups of the prompt, mean rollouts drawn
    by the same random numbers.
    """
    hashes, names = [], []
    for request, siblings in zip(requests, rollouts, strict=True):
        for rollout in siblings:
            if float(rollout.log_probs.double().sum()) < -LEAST_NATS:
                who = hashlib.blake2b(request.prompt.id.encode(), digest_size=16).digest()
                digest = hashlib.blake2b(who + rollout.token_ids.numpy().tobytes(), digest_size=8).digest()
                hashes.append(int.from_bytes(digest, "little", signed=True))
                names.append(f"prompt {request.prompt.id}: sibling {rollout.index}")
    return torch.tensor(hashes, dtype=torch.int64), names
