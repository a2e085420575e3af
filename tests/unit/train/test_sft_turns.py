"""The loss and the gradient of supervised training on turns with observations, from a loop in float64."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace

import fakes
import pytest
import torch
from dist.steps import _Silent, configured, make_trainer

from megatron_brorl.config.schema import OptimConfig, SftConfig
from megatron_brorl.train.sft import sft
from megatron_brorl.types import Demonstration

# The ids and the mask of each response.
RESPONSES = [((40, 2, 51, 52, 53, 7, 2), "1100011"), ((60, 61, 9), "001"), ((12, 30, 31, 2, 5), "10110")]
ANSWER = ((7, 11, 2), "111")  # the response of a prompt without a demonstration


def test_only_turns_of_the_model_are_trained_on(processes, model):
    given = [*(Demonstration(ids, tuple(char == "1" for char in mask)) for ids, mask in RESPONSES), None]
    prompts = [replace(p, answer="7", demonstration=own) for p, own in zip(fakes.prompts(4), given, strict=True)]
    source = SimpleNamespace(prompts=lambda _start, _count: prompts)
    tokenizer = SimpleNamespace(eos_id=2, encode=lambda text: [int(text), 11])
    rows = []
    writer = SimpleNamespace(write=lambda _step, metrics, _seconds: rows.append(metrics))
    worker = make_trainer(model[0], processes, configured({}), fakes.Engine()).worker
    sft(worker, source, tokenizer, SftConfig(1, 4), OptimConfig(1e-3), writer, _Silent())

    reference = copy.deepcopy(model[1]).double()
    losses = []
    for prompt, (ids, mask) in zip(prompts, [*RESPONSES, ANSWER], strict=True):
        log_probs = reference(torch.tensor([[*prompt.token_ids, *ids]])).logits[0].log_softmax(-1)
        at = zip(log_probs[len(prompt.token_ids) - 1 :], ids, mask, strict=False)
        losses += [-row[token] for row, token, char in at if char == "1"]
    loss = torch.stack(losses).mean()
    loss.backward()
    norm = sum(float(p.grad.square().sum()) for p in reference.parameters()) ** 0.5
    assert rows[0]["tokens"] == len(losses)
    assert rows[0]["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert rows[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)
