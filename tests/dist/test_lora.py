"""LoRA in all layouts against PEFT's adapters of transformers' models."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import tiny
import torch
from dist.jobs import rows
from dist.lora_jobs import ADVANTAGES, TEMPERATURE
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from torch import Tensor

from megatron_brorl.config.schema import LoraConfig

ALL = LoraConfig(rank=3, alpha=7.0)
SOME = LoraConfig(rank=5, targets=("q_proj", "down_proj"))
SEQUENCE = {"tensor": 2, "sequence": True}
DIVIDED = {"tensor": 2, "pipeline": 2, "sequence": True}
REFERENCE = {"ops": "reference"}
SELECTIVE = {"fields": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}}

CASES: list[tuple[int, dict[str, Any], dict[str, Any], str, LoraConfig]] = [  # ranks, layout, options, family, lora
    (1, {}, {}, "llama", ALL),
    (1, {}, REFERENCE, "llama", ALL),
    (1, {}, {"share_prompt": False, "tokens": 60}, "llama", SOME),
    (1, {}, SELECTIVE, "qwen3", ALL),
    (1, {}, {"recompute": True}, "gemma3", SOME),
    (2, {}, {}, "llama", ALL),
    (2, {"tensor": 2}, {}, "llama", ALL),
    (2, SEQUENCE, {}, "qwen2", ALL),
    (2, SEQUENCE, REFERENCE, "llama", ALL),
    (2, {"pipeline": 2}, {}, "llama", ALL),
    (4, DIVIDED, {"recompute": True, "tokens": 60}, "llama", SOME),
    (4, DIVIDED, {}, "qwen3", ALL),
]


@pytest.fixture(scope="module")
def peft_results(tmp_path_factory):
    """Return the model directory, the adapters, and the results of a plain loop over responses in float64."""
    cache: dict[Any, Any] = {}

    def get(family: str, lora: LoraConfig) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
        if (family, lora) not in cache:
            directory = tmp_path_factory.mktemp(family)
            cache[family, lora] = (str(directory), *loop(tiny.make_model(directory, family, tied=True), lora))
        return cache[family, lora]

    return get


def loop(model: Any, lora: LoraConfig) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return random adapters, and log-probs, last logits, gradients and merged weights by PEFT."""
    config = PeftConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets))
    model = get_peft_model(model.double(), config)
    parameters = {n.replace(".default", ""): p for n, p in model.named_parameters() if p.requires_grad}
    torch.manual_seed(1)
    for p in parameters.values():
        p.data.normal_(std=0.2)

    expected = defaultdict(list)
    prompts, responses = rows(2)
    tokens = sum(map(len, responses))
    for prompt, response, advantage in zip(prompts, responses, ADVANTAGES, strict=True):
        with pytest.MonkeyPatch.context() as patch:
            # transformers computes norms and rotary angles in float32.
            patch.setattr(torch, "float", torch.float64)
            patch.setattr(torch, "float32", torch.float64)
            patch.setattr(Tensor, "float", Tensor.double)
            logits = model(torch.cat((prompt, response))[None]).logits[0, len(prompt) - 1 : -1]
        log_probs = (logits / TEMPERATURE).log_softmax(-1).gather(-1, response[:, None]).squeeze(-1)
        (-advantage * log_probs.sum() / tokens).backward()
        expected["log_probs"].append(log_probs.detach())
        expected["logits"].append(logits[-1].detach())
    adapters = {name: p.detach().clone() for name, p in parameters.items()}
    gradients = {name: p.grad for name, p in parameters.items()}
    return adapters, {**expected, "gradients": gradients, "merged": model.merge_and_unload().state_dict()}


@pytest.mark.parametrize(("size", "parallel", "options", "family", "lora"), CASES)
def test_outputs_gradients_and_merged_weights_equal_peft_s(worlds, peft_results, size, parallel, options, family, lora):
    directory, adapters, expected = peft_results(family, lora)
    results = worlds(size).run("lora_jobs:forward_and_gradients", directory, parallel, lora, adapters, options)
    for rank, result in enumerate(results):
        for log_probs, exact in zip(result["log_probs"], expected["log_probs"], strict=True):
            torch.testing.assert_close(log_probs.double(), exact, atol=1e-6, rtol=0)
        assert (result["logits"] is None) == ("pipeline" in parallel and rank < size // 2)
        if result["logits"] is not None:
            torch.testing.assert_close(result["logits"], torch.stack(expected["logits"]), atol=1e-6, rtol=0)
        assert all(torch.equal(result["adapters"][name], value) for name, value in adapters.items())
        assert result["gradients"].keys() == result["adapters"].keys() == adapters.keys()
        for name, gradient in expected["gradients"].items():
            assert (result["gradients"][name] - gradient).norm() <= 1e-6 * gradient.norm(), name
        for name, weight in result["merged"].items():
            torch.testing.assert_close(weight, expected["merged"][name], atol=1e-12, rtol=0)


TRAINED = [  # size, parallel, options, largest relative error of the trained adapters
    (1, {}, {}, 1e-4),
    (2, {}, {"distributed_optimizer": True, "overlap": True, "tokens": 60}, 1e-4),
    (4, DIVIDED, {"offload": True}, 1e-4),
    (1, {}, {"distributed_optimizer": True, "dtype": torch.bfloat16}, 0.1),
]


@pytest.fixture(scope="module")
def trained(worlds, directory):
    """Return the adapters of one process before and after training."""
    return worlds(1).run("lora_jobs:train_with_reference", directory, {}, {})[0][1]


@pytest.mark.parametrize(("size", "parallel", "options", "error"), TRAINED)
def test_training_and_the_reference(worlds, directory, trained, size, parallel, options, error):
    """The reference is the base model, with the same bits, and after its reset it is the policy of that moment."""
    dtype = options.get("dtype", torch.float32)
    for log_probs, adapters in worlds(size).run("lora_jobs:train_with_reference", directory, parallel, options):
        for name, other in {"reference": "base", "reference after its reset": "trained"}.items():
            assert all(torch.equal(a, b) for a, b in zip(log_probs[name], log_probs[other], strict=True)), name
        for before, after, change in (("base", "trained", 1e-2), ("trained", "actor", 1e-3)):
            pairs = zip(log_probs[before], log_probs[after], strict=True)
            assert max(float((a - b).abs().max()) for a, b in pairs) > change
        for name, value in trained[0].items():
            assert torch.equal(adapters[0][name], value.to(dtype)), name
        for name, value in trained[1].items():
            assert (adapters[1][name] - value).norm() <= error * value.norm(), name


def test_new_adapters_are_peft_s(trained):
    """All b are 0, and all a are uniform within +-1 / sqrt(in), and differ between layers."""
    before = trained[0]
    for name, value in before.items():
        bound = 0.0 if "lora_B" in name else value.shape[1] ** -0.5
        assert 0.9 * bound <= value.abs().max() <= bound
        assert value.mean().abs() <= 0.25 * bound
    first, second = (before[f"base_model.model.model.layers.{i}.self_attn.q_proj.lora_A.weight"] for i in (0, 1))
    assert not torch.equal(first, second)
