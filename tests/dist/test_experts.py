"""Mixtures of experts in many layouts: logits and gradients of transformers, training steps of one process."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from dist.jobs import rows

EP2, EP4 = {"expert": 2}, {"expert": 4}
TP = {"tensor": 2, "sequence": True}
WHOLE = {"share_prompt": False}  # context parallelism needs whole sequences
LAYOUTS = [
    (1, {}, {}),
    (1, {}, {"ops": "reference", "tokens": 60}),
    (2, {}, {"recompute": True}),
    (2, {"pipeline": 2}, {}),
    (2, EP2, {}),
    (2, EP2, {"share": 0.3, "tokens": 60}),  # 2 and 5 micro-batches
    (2, EP2, {"share": 1.0, "overlap": True}),  # no rows on one rank
    (2, {**TP, **EP2}, {}),
    (2, {**TP, **EP2}, {"ops": "reference"}),
    (2, {"context": 2, **EP2}, WHOLE),
    (4, EP4, {}),
    (4, EP2, {"share": 0.1, "tokens": 60}),
    (4, {"pipeline": 2, **EP2}, {"recompute": True}),
    (4, {**TP, **EP4}, {"share": 0.3}),
    (4, {**TP, **EP2, "pipeline": 2}, {}),
    (4, {**TP, **EP4, "context": 2}, WHOLE),
]


@pytest.fixture(scope="module", params=[True, False], ids=["norm_topk_prob", "plain_weights"])
def model(request, tmp_path_factory):
    """A directory, whether weights of a token's experts are divided by their sum, and transformers' results."""
    directory = tmp_path_factory.mktemp("moe")
    made = tiny.make_model(directory, "qwen3_moe", False, norm_topk_prob=request.param)
    prompts, responses = rows(1)
    logits = []
    loss = torch.zeros(())
    for prompt, response in zip(prompts, responses, strict=True):
        logits.append(made(torch.cat((prompt, response))[None]).logits[0, len(prompt) - 1 : -1])
        loss = loss - logits[-1].log_softmax(-1).gather(-1, response[:, None]).sum()
    (loss / sum(map(len, responses))).backward()

    gradients = {}
    for name, parameter in made.named_parameters():
        prefix, _, kind = name.partition(".mlp.experts.")
        if not kind:
            gradients[name] = parameter.grad
        for expert, x in enumerate(parameter.grad if kind else ()):
            parts = ["down_proj"] if kind == "down_proj" else ["gate_proj", "up_proj"]
            for part, value in zip(parts, x.chunk(len(parts)), strict=True):
                gradients[f"{prefix}.mlp.experts.{expert}.{part}.weight"] = value
    return str(directory), request.param, [x.detach() for x in logits], gradients


@pytest.mark.parametrize(("size", "parallel", "options"), LAYOUTS)
def test_logits_and_gradients_equal_transformers(worlds, model, size, parallel, options):
    directory, normalised, logits, expected = model
    if not normalised and size == 4:
        pytest.skip("the division by the sum does not depend on the layout")
    norm = torch.stack([x.norm() for x in expected.values()]).norm().item()
    assert max(float(x.abs().max()) for name, x in expected.items() if ".mlp.gate." in name) > 0.01
    seen: set[Any] = set()
    for found, gradients, got in worlds(size).run("expert_jobs:gradients", directory, parallel, options):
        assert got == pytest.approx(norm, rel=1e-5)
        for row, values in found.items():
            torch.testing.assert_close(values, logits[row], atol=1e-4, rtol=0)
        for name, value in gradients.items():
            torch.testing.assert_close(value, expected[name], atol=5e-6, rtol=0)
        seen |= {*found, *gradients}
    assert seen == {*range(len(logits)), *expected}


ZERO = {"distributed_optimizer": True}
OVERLAPPED = {**ZERO, "overlap": True}
TRAINING = [
    (2, {}, OVERLAPPED),
    (2, EP2, {"tokens": 60, "offload": True}),
    (2, EP2, ZERO),
    (2, EP2, {"overlap": True}),
    (2, {**TP, **EP2}, OVERLAPPED),
    (2, {"context": 2, **EP2}, {**OVERLAPPED, **WHOLE}),
    (4, EP2, {**OVERLAPPED, "tokens": 60}),  # each expert on two ranks, which share its optimizer
    (4, {"pipeline": 2, **EP2}, {**OVERLAPPED, "offload": True, "recompute": True}),
    (4, {**TP, **EP4}, {**ZERO, "offload": True}),
]


@pytest.fixture(scope="module")
def single(worlds, model):
    """Two updates in a single process with the ops in plain torch, with and without training the routers."""
    options = {"tokens": 100_000, "ops": "reference", "share_prompt": False}
    return {
        frozen: worlds(1).run("expert_jobs:train_steps", model[0], {}, options | {"freeze_router": frozen})[0]
        for frozen in (False, True)
    }


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("size", "parallel", "options"), TRAINING)
def test_training_steps_equal_a_single_process(worlds, model, single, size, parallel, options, frozen):
    if not model[1] or (frozen and size == 4):
        pytest.skip("covered by other cases")
    expected_metrics, expected = single[frozen]
    before = tiny.weights(model[0])
    seen = set()
    options = options | {"freeze_router": frozen}
    for metrics, weights in worlds(size).run("expert_jobs:train_steps", model[0], parallel, options):
        for got, want in zip(metrics, expected_metrics, strict=True):
            for key in ("loss", "grad_norm", "entropy"):
                assert got[key] == pytest.approx(want[key], rel=1e-5)
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=0)
            assert torch.equal(value, before[name]) == (frozen and ".mlp.gate." in name)
        seen |= set(weights)
    assert seen == set(expected)
