"""Loss, gradient norm and token count of one step on rollouts of the fake engine, by transformers, row by row."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import fakes
import pytest
import torch

from megatron_brorl.ops.philox import stream_key
from megatron_brorl.types import Prompt

Group = tuple[Prompt, list[list[int]], list[float]]  # a prompt, its responses and their rewards
Slot = tuple[str, int]  # prompt id and sibling
Factors = Mapping[Slot, tuple[float, float]]  # factor of the loss, and tokens that count in the divisor


def responses(
    seed: int, prompt: Prompt, n: int, tokens: int, lost: Iterable[Slot] = (), stream: int | str = 0
) -> list[list[int]]:
    """Return the responses that the fake engine samples in a step (stream), including the stop tokens."""
    sampled_rows = enumerate(fakes.draws(stream_key(seed, stream, prompt.id), range(n), tokens))
    lost_slots = set(lost)
    return [
        row[: row.index(fakes.STOP) + 1] if fakes.STOP in row else row
        for sibling, row in sampled_rows
        if (prompt.id, sibling) not in lost_slots
    ]


def without_stop(response: list[int]) -> list[int]:
    return response[:-1] if response[-1] == fakes.STOP else response


def right(response: list[int]) -> float:
    """Return the reward of a response by fakes.Pool, which gets the text before the stop token."""
    return float(response[-1] == fakes.STOP and sum(response[:-1]) % 2 == 0)


def first_step(seed: int, count: int, n: int, tokens: int, lost: Iterable[Slot] = ()) -> list[Group]:
    """Return the groups of the first step: `count` prompts, n responses each. A response that was cut off is wrong."""
    rows = [(prompt, responses(seed, prompt, n, tokens, lost)) for prompt in fakes.prompts(count)]
    return [(prompt, sampled, list(map(right, sampled))) for prompt, sampled in rows]


def update(
    model: Any, groups: Sequence[Group], cap: float, left_out: Collection[Slot] = (), factors: Factors | None = None
) -> tuple[float, float, int]:
    """Return the loss, the gradient norm and the number of tokens of one optimizer step (BroRL, section 3.1).

    left_out: (prompt id, sibling) of rollouts that are not trained on, although their rewards count. factors: the only
    rollouts to train on, each with the factor of its loss and the tokens that it adds to the divisor.
    """
    centred = [r - sum(rewards) / len(rewards) for _, _, rewards in groups for r in rewards]
    mean = math.fsum(centred) / len(centred)
    std = math.sqrt(math.fsum((x - mean) ** 2 for x in centred) / len(centred))
    advantages = iter([(x - mean) / std for x in centred])
    loss_sum = torch.zeros((), dtype=torch.float64)
    trained_tokens, divisor = 0, 0.0
    model.zero_grad()
    for prompt, rows, _ in groups:
        start = len(prompt.token_ids)
        longest = max(map(len, rows))
        padded = torch.tensor([[*prompt.token_ids, *row, *[0] * (longest - len(row))] for row in rows])
        log_probs = model(padded).logits[:, start - 1 : -1].log_softmax(-1)
        for sibling, (row, row_log_probs) in enumerate(zip(rows, log_probs, strict=True)):
            advantage = next(advantages)
            slot = (prompt.id, sibling)
            if slot in left_out or (factors is not None and slot not in factors):
                continue
            factor, divisor_tokens = factors[slot] if factors else (1.0, len(row))
            actor = row_log_probs[torch.arange(len(row)), torch.tensor(row)]
            sampler = torch.tensor([fakes.log_prob(t, version=0) for t in row])
            weight = (actor.detach() - sampler).exp().clamp(max=cap)
            loss_sum = loss_sum - factor * (weight * (actor - actor.detach()).exp() * advantage).double().sum()
            trained_tokens += len(row)
            divisor += divisor_tokens
    (loss_sum / divisor).backward()
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
    return float(loss_sum.detach()) / divisor, norm, trained_tokens


def assert_update(values: Mapping[str, float], *arguments: Any, **options: Any) -> None:
    """Compare the metrics of a step with `update` of these arguments."""
    loss, norm, tokens = update(*arguments, **options)
    assert values["trained_tokens"] == tokens
    assert values["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-7)
    assert values["grad_norm"] == pytest.approx(norm, rel=1e-4)
