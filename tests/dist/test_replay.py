"""Router replay: training with given experts, compared with transformers, whose routers are replaced."""

from __future__ import annotations

from functools import partial

import pytest
import tiny
import torch
from dist.jobs import rows

EP2 = {"expert": 2}
TP = {"tensor": 2, "sequence": True}
WHOLE = {"share_prompt": False}  # context parallelism needs whole sequences
LAYOUTS = [
    (1, {}, {}),
    (1, {}, {**WHOLE, "tokens": 60, "recompute": True}),
    (2, {"pipeline": 2}, {"tokens": 60}),
    (2, EP2, {"first": 7, "tokens": 60}),
    (2, EP2, {"first": 24}),  # no rows on one rank
    (2, {**TP, **EP2}, {"tokens": 60}),
    (2, {**TP, **EP2}, {"recompute": True}),
    (2, {"context": 2, **EP2}, {**WHOLE, "tokens": 60}),
    (4, {"pipeline": 2, **EP2}, {"recompute": True, "tokens": 60}),
    (4, {**TP, "expert": 4, "context": 2}, WHOLE),
]


def given_experts(gate, experts, hidden):
    """Return logits, weights of the given experts [tokens, k] and the experts, as a router of transformers does."""
    logits = torch.nn.functional.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
    weights = logits.softmax(-1).gather(-1, experts)
    return logits, weights / weights.sum(-1, keepdim=True) if gate.norm_topk_prob else weights, experts


@pytest.fixture(scope="module", params=[True, False], ids=["norm_topk_prob", "plain_weights"])
def given(request, tmp_path_factory):
    """A model, random experts for every token, and log-probs and gradients by transformers with these experts."""
    directory = tmp_path_factory.mktemp("moe")
    model = tiny.make_model(directory, "qwen3_moe", False, norm_topk_prob=request.param)
    prompts, responses = rows(1)
    g = torch.Generator().manual_seed(4)

    def drawn(count):
        return torch.rand(count, 4, 8, generator=g).argsort(-1)[..., :2].to(torch.uint8)

    # Rows with the same prompt have its experts in common, because a stream may contain the prompt once.
    of_prompts = {id(prompt): drawn(len(prompt)) for prompt in prompts}
    routes = [torch.cat((of_prompts[id(p)], drawn(len(r) - 1))) for p, r in zip(prompts, responses, strict=True)]

    log_probs = []
    for prompt, response, own in zip(prompts, responses, routes, strict=True):
        for i, layer in enumerate(model.model.layers):
            layer.mlp.gate.forward = partial(given_experts, layer.mlp.gate, own[:, i].long())
        logits = model(torch.cat((prompt, response[:-1]))[None]).logits[0, len(prompt) - 1 :]
        log_probs.append(logits.log_softmax(-1).gather(-1, response[:, None]).squeeze(-1))
    (-torch.cat(log_probs).mean()).backward()
    for parameter in model.parameters():
        parameter.data = parameter.grad
    model.save_pretrained(directory / "gradients")  # with one tensor for each expert
    gradients = tiny.weights(directory / "gradients")
    return str(directory), request.param, routes, [x.detach() for x in log_probs], gradients


@pytest.mark.parametrize(("size", "parallel", "options"), LAYOUTS)
def test_log_probs_and_gradients_equal_transformers(worlds, given, size, parallel, options):
    directory, normalised, routes, expected, gradients = given
    if not normalised and size > 1:
        pytest.skip("the weights of experts do not depend on the layout")
    seen = set()
    for log_probs, found in worlds(size).run("replay_jobs:gradients", directory, parallel, options, routes):
        for row, values in log_probs.items():
            torch.testing.assert_close(values, expected[row], atol=5e-6, rtol=0)
        for name, value in found.items():
            torch.testing.assert_close(value, gradients[name], atol=5e-6, rtol=0)
        seen |= {*log_probs, *found}
    assert seen == {*range(len(expected)), *gradients}
    assert max(float(x.abs().max()) for name, x in gradients.items() if ".mlp.gate." in name) > 0.01


def test_replay_removes_most_of_the_gap_to_an_engine_in_bfloat16(worlds, given):
    if not given[1]:
        pytest.skip("one model is enough")
    ((gaps, probes),) = worlds(1).run("replay_jobs:engine_gaps", given[0])
    without, replayed = ((gap.exp() - 1).abs().gt(0.2).float().mean() for gap in gaps)  # share of ratios
    assert without > 0.04
    assert replayed < without / 20
    assert gaps[1].abs().mean() < gaps[0].abs().mean() / 2
    assert probes[1].mean < probes[0].mean / 2
