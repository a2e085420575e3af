"""The built-in engine with a mixture of experts: log-probabilities and chosen experts of transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny
import torch

from megatron_brorl.families.shape import read_shape
from megatron_brorl.models.weights.names import hf_shapes
from megatron_brorl.ops.fused.decode import FusedDecode
from megatron_brorl.ops.reference.decode import ReferenceDecode
from megatron_brorl.ops.reference.sampling import sample_tokens
from megatron_brorl.rollout.engine import Request, Sampling
from megatron_brorl.rollout.native.engine import TorchEngine
from megatron_brorl.rollout.native.pages import page_bytes
from megatron_brorl.types import Prompt

SAMPLING = Sampling(1.0, 1.0, 0, 40, (2,), routes=True)
# The first three share two blocks of 64 tokens.
_IDS = torch.randint(3, tiny.VOCAB, (4, 160), generator=torch.Generator().manual_seed(0))
_IDS[:3, :130] = _IDS[0, :130]
PROMPTS = [
    Prompt(f"p{i}", "", tuple(ids[:n].tolist()), None, "exact")
    for i, (ids, n) in enumerate(zip(_IDS, (150, 131, 129, 1), strict=True))
]
REQUESTS = [Request(p, 5 + i, 6) for i, p in enumerate(PROMPTS)]


@pytest.fixture(scope="module", params=[True, False], ids=["norm_topk_prob", "plain_weights"])
def moe(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("moe")
    return directory, tiny.make_model(directory, "qwen3_moe", False, norm_topk_prob=request.param)


def make_engine(directory, rows=64, pages=0, ops=None, dtype=torch.float32):
    shape = read_shape(directory)
    memory = pages * page_bytes(shape, dtype)
    cpu = torch.device("cpu")
    engine = TorchEngine(shape, hf_shapes(shape), cpu, dtype, rows, sample_tokens, ops or FusedDecode(), memory)
    engine.update_weights(tiny.weights(directory).items(), version=0)
    return engine


def by_transformers(model, prompt, rollout):
    """Return log-probs [G] and experts [prompt + G - 1, layers, k] of a rollout."""
    ids = torch.tensor([*prompt.token_ids, *rollout.token_ids.tolist()])
    with torch.no_grad():
        found = model(ids[None], output_router_logits=True)
    log_probs = found.logits[0, len(prompt.token_ids) - 1 : -1].log_softmax(-1)
    k = model.config.num_experts_per_tok
    routes = torch.stack([x[:-1].topk(k).indices for x in found.router_logits], dim=1)
    return log_probs.gather(-1, rollout.token_ids[:, None]).squeeze(-1), routes


def assert_as_transformers(model, prompt, rollout):
    log_probs, routes = by_transformers(model, prompt, rollout)
    assert torch.equal(rollout.routes, routes.to(rollout.routes.dtype))
    known = rollout.log_probs != 0  # not the tokens of an observation
    torch.testing.assert_close(rollout.log_probs[known], log_probs[known], atol=5e-5, rtol=0)


@pytest.mark.parametrize("ops", [FusedDecode(), ReferenceDecode()])
def test_log_probs_and_routes_equal_transformers(moe, ops):
    groups = make_engine(moe[0], ops=ops).generate(REQUESTS, SAMPLING)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for rollout in group:
            assert rollout.routes.dtype == torch.uint8
            assert_as_transformers(moe[1], prompt, rollout)
    (unasked,) = make_engine(moe[0]).generate(REQUESTS[:1], replace(SAMPLING, routes=False))
    assert unasked[0].routes is None


def test_greedy_equals_transformers_generate(moe):
    groups = make_engine(moe[0]).generate(REQUESTS, replace(SAMPLING, temperature=0))
    for prompt, group in zip(PROMPTS, groups, strict=True):
        ids = torch.tensor([prompt.token_ids])
        expected = moe[1].generate(ids, do_sample=False, max_new_tokens=40, eos_token_id=2, pad_token_id=0)
        assert [r.token_ids.tolist() for r in group] == [expected[0, ids.shape[1] :].tolist()] * 6


@pytest.mark.parametrize(("rows", "pages"), [(1, 0), (5, 0), (64, 34)])
def test_rollouts_do_not_depend_on_the_batch(moe, rows, pages):
    """Alone, in waves, and with so few pages that rows are evicted and continue."""
    together = make_engine(moe[0]).generate(REQUESTS, SAMPLING)
    engine = make_engine(moe[0], rows, pages)
    groups = engine.generate(REQUESTS, SAMPLING)
    # An evicted row computes its prompt again.
    assert not pages or engine.kv_usage().prompt_tokens > sum(r.n * len(r.prompt.token_ids) for r in REQUESTS)
    for prompt, group, other in zip(PROMPTS, groups, together, strict=True):
        for a, b in zip(group, other, strict=True):
            assert torch.equal(a.token_ids, b.token_ids)
            assert torch.equal(a.routes, b.routes)
            assert_as_transformers(moe[1], prompt, a)


def test_routes_cover_continued_rollouts_and_observations(moe):
    """Every call adds 9 tokens to a rollout, and an environment 4."""
    engine = make_engine(moe[0])
    requests = REQUESTS
    for _ in range(2):
        groups = engine.generate(requests, replace(SAMPLING, stop_ids=(), tokens_per_call=9))
        requests = []
        for request, group in zip(REQUESTS, groups, strict=True):
            begun = []
            for r in group:
                assert_as_transformers(moe[1], request.prompt, r)
                observed = (
                    torch.cat((r.token_ids, torch.tensor([7, 50, 3, 9]))),
                    torch.cat((r.log_probs, torch.zeros(4))),
                )
                begun.append(replace(r, token_ids=observed[0], log_probs=observed[1], routes=None))
            requests.append(replace(request, begun=tuple(begun)))
    assert {len(r.token_ids) for group in groups for r in group} == {22}


def test_many_experts_have_two_bytes(tmp_path):
    model = tiny.make_model(tmp_path, "qwen3_moe", False, num_experts=300, num_experts_per_tok=3, num_hidden_layers=2)
    (group,) = make_engine(tmp_path).generate(REQUESTS[:1], SAMPLING)
    for rollout in group:
        assert rollout.routes.dtype == torch.int16
        assert_as_transformers(model, PROMPTS[0], rollout)
    assert max(int(rollout.routes.max()) for rollout in group) > 255


def test_recorded_routes_explain_bfloat16(moe, monkeypatch):
    """With the engine's experts, transformers' log-probs in float32 are nearer to those of the engine in bfloat16."""
    groups = make_engine(moe[0], dtype=torch.bfloat16).generate(REQUESTS, SAMPLING)
    pairs = [(prompt, r) for prompt, group in zip(PROMPTS, groups, strict=True) for r in group]
    free = torch.cat([(by_transformers(moe[1], *pair)[0] - pair[1].log_probs).abs() for pair in pairs])

    gates = [layer.mlp.gate for layer in moe[1].model.layers]
    own = [gate.forward for gate in gates]
    replayed = []
    for prompt, rollout in pairs:
        for i, gate in enumerate(gates):
            # The last token has no recorded experts. Its logits are not used.
            chosen = torch.cat((rollout.routes[:, i], rollout.routes[-1:, i])).long()

            def forward(x, i=i, chosen=chosen):
                logits = own[i](x)[0]
                weights = logits.softmax(-1).gather(-1, chosen)
                if moe[1].config.norm_topk_prob:
                    weights = weights / weights.sum(-1, keepdim=True)
                return logits, weights, chosen

            monkeypatch.setattr(gate, "forward", forward)
        replayed.append((by_transformers(moe[1], prompt, rollout)[0] - rollout.log_probs).abs())
    replayed = torch.cat(replayed)
    assert replayed.mean() < 0.04
    assert replayed.mean() < free.mean() / 2
