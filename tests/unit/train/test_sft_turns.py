"""The loss and the gradient of supervised training on turns with observations, from a loop in float64."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace

import fakes
import pytest
import torch
from dist.steps import _Silent, configured, make_trainer
from unit.train.test_nonfinite_rows import Sums

from megatron_brorl.config.schema import OptimConfig, SftConfig
from megatron_brorl.train.sft import sft
from megatron_brorl.types import Demonstration

# The ids and the mask of each response. The last one is the answer of a prompt without a demonstration.
RESPONSES = [((40, 2, 51, 52, 7, 2), "110011"), ((60, 61, 9), "001"), ((12, 31, 2, 5), "1010"), ((7, 11, 2), "111")]


def test_only_turns_of_the_model_are_trained_on(processes, model):
    given = [*(Demonstration(ids, tuple(char == "1" for char in mask)) for ids, mask in RESPONSES[:-1]), None]
    prompts = [replace(p, answer="7", demonstration=own) for p, own in zip(fakes.prompts(4), given, strict=True)]
    rows = []
    writer = SimpleNamespace(write=lambda _step, metrics, _seconds: rows.append(metrics))
    worker = make_trainer(model[0], processes, configured({}), fakes.Engine()).worker
    source = SimpleNamespace(prompts=lambda _start, _count: prompts)
    sft(worker, source, Sums(), SftConfig(1, 4), OptimConfig(1e-3), writer, _Silent())

    reference = copy.deepcopy(model[1]).double()
    losses = []
    for prompt, (ids, mask) in zip(prompts, RESPONSES, strict=True):
        log_probs = reference(torch.tensor([[*prompt.token_ids, *ids]])).logits[0].log_softmax(-1)
        at = zip(log_probs[len(prompt.token_ids) - 1 :], ids, mask, strict=False)
        losses += [-row[token] for row, token, char in at if char == "1"]
    loss = torch.stack(losses).mean()
    loss.backward()
    norm = sum(float(p.grad.square().sum()) for p in reference.parameters()) ** 0.5
    assert rows[0]["tokens"] == len(losses)
    assert rows[0]["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert rows[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)
