"""The loss and the gradient of supervised training on turns with observations, from a loop in float64."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import fakes
import pytest
import torch
from dist.steps import _Silent, configured, make_trainer

from megatron_brorl.config.schema import OptimConfig, SftConfig
from megatron_brorl.train.sft import sft
from megatron_brorl.types import Demonstration

EXAMPLES = 6


def demonstration(number: int) -> Demonstration | None:
    """Return a response with observations of one to four tokens, or None for every third example."""
    if number % 3 == 2:
        return None
    draw = torch.Generator().manual_seed(number)
    lengths = torch.randint(1, 5, (2 * number + 3,), generator=draw).tolist()
    trained = [i % 2 == 0 for i, length in enumerate(lengths) for _ in range(length)]
    return Demonstration(tuple(torch.randint(3, 100, (len(trained),), generator=draw).tolist()), tuple(trained))


class Turns:
    """Prompts with demonstrations, or with the answer 7."""

    eos_id = 2

    def prompts(self, start, count):
        return [replace(p, answer="7", demonstration=demonstration(i)) for i, p in enumerate(fakes.prompts(count))]

    def encode(self, text):
        return [int(text), 11]


def by_hand(model) -> tuple[float, float, int]:
    """Return loss, gradient norm and number of trained tokens."""
    model = copy.deepcopy(model).double()
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    for i, prompt in enumerate(fakes.prompts(EXAMPLES)):
        own = demonstration(i) or Demonstration((7, 11, 2), (True,) * 3)
        ids = [*prompt.token_ids, *own.token_ids]
        log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        for position, (token, trained) in enumerate(zip(own.token_ids, own.trained, strict=True)):
            if trained:
                total = total - log_probs[len(prompt.token_ids) + position - 1, token]
                count += 1
    loss = total / count
    loss.backward()
    return float(loss.detach()), math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters())), count


def test_only_turns_of_the_model_are_trained_on(processes, model):
    rows = []

    class Rows:
        def write(self, _step, metrics, _seconds):
            rows.append(metrics)

    worker = make_trainer(model[0], processes, configured({}), fakes.Engine()).worker
    sft(worker, Turns(), Turns(), SftConfig(1, EXAMPLES), OptimConfig(1e-3), Rows(), _Silent())
    loss, norm, count = by_hand(model[1])
    assert rows[0]["tokens"] == count
    assert rows[0]["loss"] == pytest.approx(loss, rel=1e-5)
    assert rows[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)
