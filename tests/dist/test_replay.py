"""Router replay: training with given experts, compared with transformers, whose routers are replaced."""

from __future__ import annotations

import pytest
import tiny
import torch
from dist.expert_jobs import by_transformers
from dist.jobs import rows
from dist.test_experts import EP2, TP, WHOLE


@pytest.fixture(scope="module", params=[True, False], ids=["normalised", "plain_weights"])
def given(request, tmp_path_factory):
    """A model, random experts for every token, and the logits and gradients of transformers with them."""
    directory = str(tmp_path_factory.mktemp("moe"))
    model = tiny.make_model(directory, "qwen3_moe", False, norm_topk_prob=request.param)
    g = torch.Generator().manual_seed(4)

    def drawn(count):
        return torch.rand(count, 4, 8, generator=g).argsort(-1)[..., :2].to(torch.uint8)

    # Rows with the same prompt have its experts in common, because a stream may contain the prompt once.
    prompts, responses = rows(1)
    of_prompts = {id(prompt): drawn(len(prompt)) for prompt in prompts}
    routes = [torch.cat((of_prompts[id(p)], drawn(len(r) - 1))) for p, r in zip(prompts, responses, strict=True)]
    return directory, request.param, routes, *by_transformers(model, routes)


@pytest.mark.parametrize(
    ("size", "parallel", "options"),
    [
        (1, {}, {}),
        (1, {}, {"share_prompt": False, "tokens": 60, "recompute": True}),
        (2, {"pipeline": 2}, {"tokens": 60}),
        (2, EP2, {"share": 0.3, "tokens": 60}),  # 2 and 5 micro-batches
        (2, EP2, {"share": 1.0}),  # no rows on one rank
        (2, {**TP, **EP2}, {"tokens": 60}),
        (2, {**TP, **EP2}, {"recompute": True}),
        (2, {"context": 2, **EP2}, {**WHOLE, "tokens": 60}),
        (4, {"pipeline": 2, **EP2}, {"recompute": True, "tokens": 60}),
        (4, {**TP, "expert": 4, "context": 2}, WHOLE),
    ],
)
def test_log_probs_and_gradients_equal_transformers(worlds, given, size, parallel, options):
    directory, normalised, routes, logits, of_loss = given
    if not normalised and size > 1:
        pytest.skip("the weights of experts do not depend on the layout")
    seen = set()
    options = options | {"routes": routes}
    for scored, _, gradients, _ in worlds(size).run("expert_jobs:gradients", directory, parallel, options):
        for row, values in scored.items():
            wanted = logits[row].log_softmax(-1).gather(-1, rows(1)[1][row][:, None]).squeeze(-1)
            torch.testing.assert_close(values, wanted, atol=5e-6, rtol=0)
        for name, value in gradients.items():
            torch.testing.assert_close(value, of_loss[name], atol=5e-6, rtol=0)
        seen |= {*scored, *gradients}
    assert seen == {*range(len(logits)), *of_loss}
    assert max(float(x.abs().max()) for name, x in of_loss.items() if ".mlp.gate." in name) > 0.01
