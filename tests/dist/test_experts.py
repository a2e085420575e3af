"""Mixtures of experts in many layouts: logits and gradients of transformers, training steps of one process."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import tiny
import torch
from dist.jobs import rows
from transformers import AutoModelForCausalLM

from megatron_brorl.config.schema import LoraConfig

EP2, EP4 = {"expert": 2}, {"expert": 4}
TP = {"tensor": 2, "sequence": True}
SHARED = "qwen2_moe"
WHOLE = {"share_prompt": False}  # context parallelism needs whole sequences
LAYOUTS = [
    (1, {}, {}),
    (1, {}, {"ops": "reference", "tokens": 60}),
    (2, {}, {"recompute": True}),
    (2, {"pipeline": 2}, {}),
    (2, EP2, {}),
    (2, EP2, {"first": 7, "tokens": 60}),  # different numbers of micro-batches
    (2, EP2, {"first": 24, "overlap": True}),  # no rows on one rank
    (2, {**TP, **EP2}, {}),
    (2, {"context": 2, **EP2}, WHOLE),
    (4, {"context": 2, **EP2}, WHOLE),  # each expert on two ranks
    (4, EP2, {"first": 3, "tokens": 60}),  # no rows on two ranks
    (4, {"pipeline": 2, **EP2}, {"recompute": True}),
    (4, {**TP, **EP4}, {"first": 7}),
    (4, {**TP, **EP2, "pipeline": 2}, {}),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories of Qwen3-MoE by norm_topk_prob, and of Qwen2-MoE."""
    made = {kind: tmp_path_factory.mktemp("moe") for kind in (True, False, SHARED)}
    for kind, directory in made.items():
        family, normalised = (SHARED, False) if kind == SHARED else ("qwen3_moe", kind)
        tiny.make_model(directory, family, False, norm_topk_prob=normalised)
    return {kind: str(directory) for kind, directory in made.items()}


@pytest.fixture(scope="module")
def expected(models, tmp_path_factory):
    """Logits of the rows, and the gradient of the mean of -log p, by transformers, by model and replay."""
    found = {}
    for kind, replayed in product(models, (True, False)):
        model = AutoModelForCausalLM.from_pretrained(models[kind])
        logits = []
        loss = torch.zeros(())
        for prompt, response, routes in zip(*rows(1), given_experts(), strict=True):
            for i, layer in enumerate(model.model.layers if replayed else ()):
                layer.mlp.gate.forward = partial(choose, layer.mlp.gate, routes[:, i].long())
            logits.append(model(torch.cat((prompt, response[:-1]))[None]).logits[0, len(prompt) - 1 :])
            loss = loss - logits[-1].log_softmax(-1).gather(-1, response[:, None]).sum()
        (loss / sum(map(len, rows(1)[1]))).backward()

        # transformers stacks experts, and separates them when it saves a model.
        for parameter in model.parameters():
            parameter.data = parameter.grad
        target = tmp_path_factory.mktemp("gradients")
        model.save_pretrained(target)
        found[kind, replayed] = ([x.detach() for x in logits], tiny.weights(target))
    return found


def given_experts():
    """Return random experts of all tokens of the rows, [prompt + G - 1, layers, k]. A prompt has the same in each row.

    A stream with shared prompts contains it only once.
    """
    g = torch.Generator().manual_seed(4)

    def drawn(count):
        return torch.rand(count, 4, 8, generator=g).argsort(-1)[..., :2].to(torch.uint8)

    prompts, responses = rows(1)
    of_prompts = {id(prompt): drawn(len(prompt)) for prompt in prompts}
    return [torch.cat((of_prompts[id(p)], drawn(len(r) - 1))) for p, r in zip(prompts, responses, strict=True)]


def choose(gate, experts, hidden):
    """Return logits, weights of the given experts [tokens, k] and the experts, as a router of transformers does."""
    logits = torch.nn.functional.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
    weights = logits.softmax(-1).gather(-1, experts)
    return logits, weights / weights.sum(-1, keepdim=True) if gate.norm_topk_prob else weights, experts


PLAIN_WEIGHTS = [(1, {}, {}, False, False), (2, EP2, {"tokens": 60}, False, False)]  # norm_topk_prob = false
SHARED_EXPERT = [
    (1, {}, {"ops": "reference", "recompute": True}, SHARED, False),
    (2, {**TP, **EP2}, {}, SHARED, False),
    (2, {**TP, **EP2}, {"ops": "reference"}, SHARED, True),
    (4, {"pipeline": 2, **EP2}, {"recompute": True}, SHARED, False),
]
REPLAYED = [
    (1, {}, {}, False, True),
    (1, {}, {**WHOLE, "tokens": 60, "recompute": True}, True, True),
    (2, {"pipeline": 2}, {"tokens": 60}, True, True),
    (2, EP2, {"first": 7, "tokens": 60}, True, True),
    (2, {**TP, **EP2}, {"tokens": 60, "recompute": True}, True, True),
    (2, {"context": 2, **EP2}, {**WHOLE, "tokens": 60}, True, True),
    (4, {"pipeline": 2, **EP2}, {"tokens": 60, "recompute": True}, True, True),
    (4, {**TP, **EP4, "context": 2}, WHOLE, True, True),
]


@pytest.mark.parametrize(
    ("size", "parallel", "options", "kind", "replayed"),
    [*((*case, True, False) for case in LAYOUTS), *PLAIN_WEIGHTS, *SHARED_EXPERT, *REPLAYED],
)
def test_logits_and_gradients_equal_transformers(worlds, models, expected, size, parallel, options, kind, replayed):
    logits, of_loss = expected[kind, replayed]
    options = options | {"routes": given_experts() if replayed else None}
    norm = torch.stack([x.norm() for x in of_loss.values()]).norm().item()
    seen: set[Any] = set()
    for found, gradients, got in worlds(size).run("expert_jobs:gradients", models[kind], parallel, options):
        assert got == pytest.approx(norm, rel=1e-5)
        for row, values in found.items():
            torch.testing.assert_close(values, logits[row], atol=1e-4, rtol=0)
            got, want = (x.log_softmax(-1).gather(-1, rows(1)[1][row][:, None]) for x in (values, logits[row]))
            torch.testing.assert_close(got, want, atol=5e-6, rtol=0)
        for name, value in gradients.items():
            torch.testing.assert_close(value, of_loss[name], atol=5e-6, rtol=0)
        seen |= {*found, *gradients}
    assert seen == {*range(len(logits)), *of_loss}


def test_replay_removes_most_of_the_gap_to_an_engine_in_bfloat16(worlds, models):
    job = ("jobs:engine_gaps", models[True], {}, torch.bfloat16)
    without, replayed = (worlds(1).run(*job, replay)[0] for replay in (False, True))
    share = (without > 0.2).float().mean()
    assert share > 0.04
    assert (replayed > 0.2).float().mean() < share / 20
    assert replayed.mean() < without.mean() / 2


ZERO = {"distributed_optimizer": True}
OVERLAPPED = {**ZERO, "overlap": True}
FROZEN = {"freeze_router": True}
LORA = {"lora": LoraConfig(rank=4, targets=("q_proj", "o_proj"))}
TRAINING = [
    (2, {}, {}, OVERLAPPED),
    (2, EP2, {}, {"tokens": 60, "offload": True}),
    (2, EP2, FROZEN, {"overlap": True}),
    (2, {**TP, **EP2}, {}, OVERLAPPED),
    (2, {**TP, **EP2}, LORA, OVERLAPPED),
    (2, {"context": 2, **EP2}, {}, {**OVERLAPPED, **WHOLE}),
    (4, EP2, {}, {**OVERLAPPED, "tokens": 60}),  # each expert on two ranks, which share its optimizer
    (4, EP2, FROZEN, {**OVERLAPPED, "offload": True}),
    (4, {"pipeline": 2, **EP2}, {}, {**OVERLAPPED, "offload": True, "recompute": True}),
    (4, {**TP, **EP4}, {}, {**ZERO, "offload": True}),
]


@pytest.fixture(scope="module")
def single(worlds, models):
    """Two updates in a single process with the ops in plain torch, by the trained parameters."""
    options = {"tokens": 100_000, "ops": "reference", "share_prompt": False}
    before = tiny.weights(models[True])
    found = []
    for trained in ({}, FROZEN, LORA):
        result = worlds(1).run("expert_jobs:train_steps", models[True], {}, options | trained)[0]
        same = {name for name, x in result[1].items() if name in before and torch.equal(x, before[name])}
        assert same == {n for n in before if (trained == FROZEN and ".mlp.gate." in n) or trained == LORA}
        found.append((trained, result))
    return found


@pytest.mark.parametrize(("size", "parallel", "trained", "options"), TRAINING)
def test_training_steps_equal_those_of_a_single_process(worlds, models, single, size, parallel, trained, options):
    expected_metrics, expected_weights = next(result for key, result in single if key == trained)
    seen: set[str] = set()
    for metrics, weights in worlds(size).run("expert_jobs:train_steps", models[True], parallel, options | trained):
        for got, want in zip(metrics, expected_metrics, strict=True):
            for key in ("loss", "grad_norm", "entropy"):
                assert got[key] == pytest.approx(want[key], rel=1e-5, abs=1e-6)
        for name, value in weights.items():
            torch.testing.assert_close(value, expected_weights[name], atol=1e-6, rtol=0)
        seen |= set(weights)
    assert seen == set(expected_weights)


def test_the_critic_equals_that_of_a_single_process(worlds, models):
    (before, norm, after), *_ = worlds(1).run("expert_jobs:critic_step", models[True], {})
    assert float((before[0] - after[0]).abs().max()) > 1e-3
    for got in worlds(4).run("expert_jobs:critic_step", models[True], {**EP2, "pipeline": 2}):
        assert got[1] == pytest.approx(norm, rel=1e-5)
        for values, expected in zip((*got[0], *got[2]), (*before, *after), strict=False):  # empty without the row
            torch.testing.assert_close(values, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [2, 4])
def test_masters_of_experts_are_the_values_of_the_file(worlds, models, size):
    found = worlds(size).run("expert_jobs:exact_masters", models[True], EP2)
    assert set().union(*found) == {name for name in tiny.weights(models[True]) if ".experts." in name}
