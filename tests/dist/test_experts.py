"""Mixtures of experts in many layouts: logits and gradients of transformers, training steps of one process."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from dist.jobs import rows

from megatron_brorl.config.schema import LoraConfig

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


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories and transformers models by norm_topk_prob."""
    made = {}
    for normalised in (True, False):
        directory = tmp_path_factory.mktemp("moe")
        made[normalised] = (str(directory), tiny.make_model(directory, "qwen3_moe", False, norm_topk_prob=normalised))
    return made


@pytest.fixture(scope="module")
def expected(models):
    """Logits of the rows, and the gradient of the mean of -log p, by transformers."""
    prompts, responses = rows(1)
    found = {}
    for normalised, (_, model) in models.items():
        logits = []
        loss = torch.zeros(())
        for prompt, response in zip(prompts, responses, strict=True):
            logits.append(model(torch.cat((prompt, response))[None]).logits[0, len(prompt) - 1 : -1])
            loss = loss - logits[-1].log_softmax(-1).gather(-1, response[:, None]).sum()
        (loss / sum(map(len, responses))).backward()

        # transformers stacks the weights of all experts, and gate_proj on up_proj.
        gradients = {}
        for name, parameter in model.named_parameters():
            prefix, _, kind = name.partition(".mlp.experts.")
            if not kind:
                gradients[name] = parameter.grad
            for expert, x in enumerate(parameter.grad if kind else ()):
                parts = ["down_proj"] if kind == "down_proj" else ["gate_proj", "up_proj"]
                for part, value in zip(parts, x.chunk(len(parts)), strict=True):
                    gradients[f"{prefix}.mlp.experts.{expert}.{part}.weight"] = value
        found[normalised] = ([x.detach() for x in logits], gradients)
    return found


PLAIN_WEIGHTS = [(1, {}, {}, False), (2, EP2, {"tokens": 60}, False)]  # norm_topk_prob = false


@pytest.mark.parametrize(
    ("size", "parallel", "options", "normalised"), [*((*case, True) for case in LAYOUTS), *PLAIN_WEIGHTS]
)
def test_logits_and_gradients_equal_transformers(worlds, models, expected, size, parallel, options, normalised):
    logits, of_loss = expected[normalised]
    norm = torch.stack([x.norm() for x in of_loss.values()]).norm().item()
    seen: set[Any] = set()
    results = worlds(size).run("expert_jobs:gradients", models[normalised][0], parallel, options)
    for scored, found, gradients, got in results:
        assert got == pytest.approx(norm, rel=1e-5)
        for row, values in found.items():
            torch.testing.assert_close(values, logits[row], atol=1e-4, rtol=0)
        for row, values in scored.items():
            wanted = logits[row].log_softmax(-1).gather(-1, rows(1)[1][row][:, None]).squeeze(-1)
            torch.testing.assert_close(values, wanted, atol=1e-4, rtol=0)
        for name, value in gradients.items():
            torch.testing.assert_close(value, of_loss[name], atol=5e-6, rtol=0)
        seen |= {*found, *gradients}
    assert seen == {*range(len(logits)), *of_loss}


ZERO = {"distributed_optimizer": True}
OVERLAPPED = {**ZERO, "overlap": True}
FROZEN = {"freeze_router": True}
TRAINING = [
    (2, {}, OVERLAPPED),
    (2, EP2, {"tokens": 60, "offload": True}),
    (2, EP2, ZERO),
    (2, EP2, {"overlap": True, **FROZEN}),
    (2, {**TP, **EP2}, OVERLAPPED),
    (2, {**TP, **EP2}, FROZEN),
    (2, {"context": 2, **EP2}, {**OVERLAPPED, **WHOLE}),
    (4, EP2, {**OVERLAPPED, "tokens": 60}),  # each expert on two ranks, which share its optimizer
    (4, EP2, {**OVERLAPPED, **FROZEN, "offload": True}),
    (4, {"pipeline": 2, **EP2}, {**OVERLAPPED, "offload": True, "recompute": True}),
    (4, {**TP, **EP4}, {**ZERO, "offload": True}),
]


@pytest.fixture(scope="module")
def single(worlds, models):
    """Two updates in a single process with the ops in plain torch, by freeze_router."""
    options = {"tokens": 100_000, "ops": "reference", "share_prompt": False}
    return {
        frozen: worlds(1).run("expert_jobs:train_steps", models[True][0], {}, options | {"freeze_router": frozen})[0]
        for frozen in (False, True)
    }


@pytest.mark.parametrize(("size", "parallel", "options"), TRAINING)
def test_training_steps_equal_those_of_a_single_process(worlds, models, single, size, parallel, options):
    directory = models[True][0]
    frozen = "freeze_router" in options
    expected_metrics, expected_weights = single[frozen]
    before = tiny.weights(directory)
    seen: set[str] = set()
    for metrics, weights in worlds(size).run("expert_jobs:train_steps", directory, parallel, options):
        for got, want in zip(metrics, expected_metrics, strict=True):
            for key in ("loss", "grad_norm", "entropy"):
                assert got[key] == pytest.approx(want[key], rel=1e-5)
        for name, value in weights.items():
            torch.testing.assert_close(value, expected_weights[name], atol=1e-6, rtol=0)
            assert torch.equal(value, before[name]) == (frozen and ".mlp.gate." in name)
        seen |= set(weights)
    assert seen == set(expected_weights)


def test_adapters_of_attention_equal_those_of_a_single_process(worlds, models):
    options = {"lora": LoraConfig(rank=4, targets=("q_proj", "o_proj"))}
    _, wanted = worlds(1).run("expert_jobs:train_adapters", models[True][0], {}, options)[0]
    for _, found in worlds(2).run("expert_jobs:train_adapters", models[True][0], {**TP, **EP2}, options):
        assert found.keys() == wanted.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name], atol=1e-6, rtol=0)


def test_the_critic_equals_that_of_a_single_process(worlds, models):
    """With 3 rows, the expert groups of two pipelines have 2 rows and 1 row."""
    (before, after, norm, weights) = worlds(1).run("expert_jobs:critic_step", models[True][0], {}, 3)[0]
    assert max(float((a - b).abs().max()) for a, b in zip(before, after, strict=True)) > 1e-3
    results = worlds(4).run("expert_jobs:critic_step", models[True][0], {**EP2, "pipeline": 2}, 3)
    for rank, (*values, got, found) in enumerate(results):
        assert got == pytest.approx(norm, rel=1e-5)
        for part, all_rows in zip(values, (before, after), strict=True):
            torch.testing.assert_close(part, all_rows[rank % 2 :: 2], atol=1e-5, rtol=0)
        for name, value in found.items():
            torch.testing.assert_close(value, weights[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", [2, 4])
def test_masters_of_experts_are_the_values_of_the_file(worlds, models, size):
    """Weights in bfloat16 are rounded, masters are not. On 4 ranks, two ranks share the optimizer of an expert."""
    stored = tiny.weights(models[True][0])
    found = worlds(size).run("expert_jobs:masters", models[True][0], EP2)
    for expert in range(8):
        flat = stored[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"].flatten()
        assert not torch.equal(flat, flat.bfloat16().float())
        name = f"decoder.layers.1.mlp.experts.local_experts.{expert}.linear_fc2.weight"
        parts = [rank[name] for rank in found if name in rank]
        assert sum(len(values) for _, values in parts) == flat.numel()
        for start, values in parts:
            assert torch.equal(values, flat[start : start + len(values)])
