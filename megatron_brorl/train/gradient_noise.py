"""The noise of a step's gradient, measured on some of its prompts (theory.noise says what is estimated).

Two passes per prompt, one per half of its siblings, that step nothing. Gradients stay where they are reduced: only
inner products cross ranks. Two copies of a gradient are held meanwhile, which models.memory plans for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_brorl.models.gpt import Head
from megatron_brorl.parallel import device
from megatron_brorl.parallel.batch import Packed
from megatron_brorl.theory.noise import HalfGradients, gradient_noise
from megatron_brorl.train.collect import Collected
from megatron_brorl.train.groups import trained
from megatron_brorl.train.worker import Worker

LEAST = 4  # siblings of a prompt, two in each half
_AT_A_TIME = 2**24  # entries of a product that are held


def noise_metrics(
    collected: Collected, draws: Tensor, most: int, worker: Worker, temperature: float, overlong_filter: bool
) -> dict[str, float]:
    """Of the gradient at the actor's present weights, on at most `most` prompts; a collective, the same on every rank.

    draws: numbers [groups] that order the groups at random. A prompt that the step took twice counts once, one with
    fewer than LEAST siblings to train on not at all.
    """
    # Groups by what was drawn alone; which of them have a signal comes after.
    outcomes = collected.outcomes
    eligible = trained(replace(outcomes, kept=outcomes.closed), overlong_filter)  # [groups, N]
    first = {collected.groups[g].prompt.id: g for g in reversed(outcomes.closed)}
    closed = {g for g in first.values() if int(eligible[g].sum()) >= LEAST}
    kept = sorted(closed & set(outcomes.kept), key=lambda g: float(draws[g]))

    found = _half_gradients([(g, eligible[g]) for g in kept[:most]], collected, worker, temperature)
    noise = asdict(gradient_noise(found, len(kept), len(closed))) | {"noise_prompts": float(len(found))}
    return {f"theory_estimate/{name}": value for name, value in noise.items()}


def _half_gradients(
    chosen: Sequence[tuple[int, Tensor]], collected: Collected, worker: Worker, temperature: float
) -> list[HalfGradients]:
    """Of each chosen group, with its siblings bool [N]; a sum over the groups before it takes the place of pairs."""
    found: list[HalfGradients] = []
    before: list[Tensor] = []  # the sum of the gradients of the prompts taken so far
    for group, siblings in chosen:
        first, second = _halves(siblings)

        # The second pass overwrites what the first one left.
        gradient, _ = _gradient(group, first, collected, worker, temperature)
        a = [g.clone() for g in gradient]
        b, ranks = _gradient(group, second, collected, worker, temperature)
        before = before or [torch.zeros_like(g) for g in a]

        # |a - b|^2 from its parts: no third copy.
        ab, aa, bb, sa, sb = _inner_products([(a, b), (a, a), (b, b), (before, a), (before, b)], ranks)
        sizes = int(first.sum()), int(second.sum())
        found.append(HalfGradients(ab, aa + bb - 2 * ab, (sa + sb) / 2, sizes))
        for s, x, y in zip(before, a, b, strict=True):
            s.add_(x, alpha=0.5).add_(y, alpha=0.5)
    return found


def _halves(siblings: Tensor) -> tuple[Tensor, Tensor]:
    """Every other one of the siblings bool [N], and the rest."""
    odd = siblings.cumsum(0) % 2 == 1
    return siblings & odd, siblings & ~odd


def _gradient(
    group: int, half: Tensor, collected: Collected, worker: Worker, temperature: float
) -> tuple[list[Tensor], dist.ProcessGroup | None]:
    """Worker.gradient of the group's success rate, from the siblings bool [N] of one half."""
    # Leave-one-out baselines are the mean's times n / (n - 1).
    right = collected.outcomes.right[group].double()
    weights = (right - right[half].mean()) / (int(half.sum()) - 1)

    # This replica's rows of them.
    rows = [r.rollout for r in collected.rollouts if r.group == group and half[r.rollout.index]]
    own = weights[[r.index for r in rows]]
    prompt = torch.tensor(collected.groups[group].prompt.token_ids, dtype=torch.int64)

    def loss(batch: Packed, head: Head) -> tuple[Tensor, Any]:
        log_probs = head.log_probs()[0]
        return (log_probs * batch.repeat(own).to(log_probs)).sum(), None

    return worker.gradient([prompt] * len(rows), [r.token_ids for r in rows], loss, temperature)


def _inner_products(
    pairs: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]], ranks: dist.ProcessGroup | None
) -> list[float]:
    """Of vectors [any] in parts, those of these ranks together, added up in float64."""
    sums = torch.zeros(len(pairs), dtype=torch.float64, device=device.default_device())
    for i, (x, y) in enumerate(pairs):
        for u, v in zip(x, y, strict=True):
            for a, b in zip(u.reshape(-1).split(_AT_A_TIME), v.reshape(-1).split(_AT_A_TIME), strict=True):
                sums[i] += (a * b).sum(dtype=torch.float64)
    dist.all_reduce(sums, group=ranks)
    return [float(x) for x in sums]
