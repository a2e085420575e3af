"""Inner products of gradients under every layout, against transformers' gradients in float64."""

from __future__ import annotations

import pytest
import tiny
import torch
from dist.gradient_jobs import weights
from dist.jobs import rows

CASES = [
    (1, {}, {}),
    (2, {}, {}),
    (2, {}, {"distributed_optimizer": True, "overlap_grad_reduce": True}),
    (2, {"tensor": 2, "sequence": True}, {}),
    (2, {"pipeline": 2}, {"distributed_optimizer": True}),
    (2, {"context": 2}, {}),
    (4, {"tensor": 2}, {"distributed_optimizer": True, "offload": True}),
    (4, {"pipeline": 2, "tensor": 2}, {}),
]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def exact(request, tmp_path_factory):
    """A model's directory, and <a, b>, <a, a>, <b, b> of its gradients."""
    directory = tmp_path_factory.mktemp("model")
    model = tiny.make_model(directory, "qwen2", request.param).double()
    prompts, responses = rows(2)
    found = []
    for of_rows in weights(len(prompts)):
        model.zero_grad()
        for prompt, response, weight in zip(prompts, responses, of_rows, strict=True):
            logits = model(torch.cat((prompt, response))[None]).logits[0, len(prompt) - 1 : -1]
            (weight * (logits / 0.9).log_softmax(-1).gather(-1, response[:, None]).sum()).backward()
        found.append(torch.cat([p.grad.reshape(-1).clone() for p in model.parameters()]))
    a, b = found
    return str(directory), [float(x) for x in (a @ b, a @ a, b @ b)]


@pytest.mark.parametrize(("size", "parallel", "options"), CASES)
def test_inner_products_are_those_of_whole_gradients(worlds, exact, size, parallel, options):
    directory, wanted = exact
    for found in worlds(size).run("gradient_jobs:products", directory, parallel, options):
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-4 * (wanted[1] * wanted[2]) ** 0.5)
