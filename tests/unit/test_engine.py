"""The torch engine against transformers and against the actor it samples for."""

from __future__ import annotations

import pytest
import tiny
import torch

from megatron_brorl.errors import UserError
from megatron_brorl.hf_config import read_shape
from megatron_brorl.models.hf_names import hf_shapes
from megatron_brorl.ops import fused_sampling
from megatron_brorl.ops.philox import stream_key
from megatron_brorl.ops.sampling import sample_tokens
from megatron_brorl.rollout.engine import Request, Sampling
from megatron_brorl.rollout.torch_engine import TorchEngine
from megatron_brorl.types import Prompt

STOPS = (2, 5, 7, 11)


def make_engine(directory, model, max_rows=1000, sample=sample_tokens):
    shape = read_shape(directory)
    engine = TorchEngine(shape, hf_shapes(shape), torch.device("cpu"), torch.float32, max_rows, sample)
    engine.update_weights([(n, p) for n, p in model.state_dict().items() if n in engine.names], version=3)
    return engine


def prompts(lengths=(3, 9, 1, 5)):
    g = torch.Generator().manual_seed(0)
    return [
        Prompt(f"p{i}", "", tuple(torch.randint(3, tiny.VOCAB, (n,), generator=g).tolist()), None, "exact")
        for i, n in enumerate(lengths)
    ]


@pytest.fixture(scope="module", params=tiny.CASES, ids=str)
def pair(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    return directory, tiny.make_model(directory, *request.param)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    return directory, tiny.make_model(directory, "qwen2", True)


def test_greedy_equals_transformers_generate(pair):
    """Token for token, past the point where the suffix cache grows."""
    engine = make_engine(*pair)
    groups = engine.generate([Request(p, 1, 2) for p in prompts()], Sampling(0, 1, 0, 70, (2,)))
    for group in groups:
        ids = torch.tensor([group.prompt.token_ids])
        expected = pair[1].generate(ids, do_sample=False, max_new_tokens=70, eos_token_id=2, pad_token_id=0)
        for rollout in group.rollouts:
            assert rollout.token_ids.tolist() == expected[0, ids.shape[1] :].tolist()


def test_log_probs_are_those_of_the_sampling_distribution(pair):
    engine = make_engine(*pair)
    groups = engine.generate([Request(p, 7, 40) for p in prompts()], Sampling(0.8, 1, 0, 40, STOPS))
    for group in groups:
        assert group.version == 3
        assert [r.index for r in group.rollouts] == list(range(40))
        for rollout in group.rollouts:
            ids = torch.tensor([*group.prompt.token_ids, *rollout.token_ids.tolist()])
            with torch.no_grad():
                logits = pair[1](ids[None]).logits[0, len(group.prompt.token_ids) - 1 : -1]
            expected = (logits / 0.8).log_softmax(-1).gather(-1, rollout.token_ids[:, None]).squeeze(-1)
            torch.testing.assert_close(rollout.log_probs, expected, atol=1e-4, rtol=0)
            body, last = rollout.token_ids[:-1].tolist(), int(rollout.token_ids[-1])
            assert not set(body) & set(STOPS)
            assert rollout.finish == ("stop" if last in STOPS else "length")
            assert rollout.finish == "stop" or len(rollout.token_ids) == 40


def same_tokens(a, b) -> float:
    pairs = list(zip(a.rollouts, b.rollouts, strict=True))
    return sum(x.token_ids.tolist() == y.token_ids.tolist() for x, y in pairs) / len(pairs)


@pytest.mark.parametrize("dtype", [torch.float32])
def test_rollouts_do_not_depend_on_their_neighbours(one, dtype):
    """Alone, among others, in waves, and asked for in parts: the same random numbers, so the same tokens."""
    sampling = Sampling(1.0, 0.95, 0, 30, STOPS)
    asked = [Request(p, stream_key(0, 4, p.id), 64) for p in prompts()]
    together = make_engine(*one).generate(asked, sampling)
    waves = make_engine(*one, max_rows=50).generate(asked, sampling)
    for i, request in enumerate(asked):
        (alone,) = make_engine(*one).generate([request], sampling)
        parts = [Request(request.prompt, request.key, 24, 0), Request(request.prompt, request.key, 40, 24)]
        first, second = make_engine(*one).generate(parts, sampling)
        assert [r.index for r in second.rollouts] == list(range(24, 64))
        split = type(alone)(alone.prompt, first.rollouts + second.rollouts, alone.version)
        for other in (alone, waves[i], split):
            assert same_tokens(together[i], other) >= 0.98  # the rest is floating-point order


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(1.0, 1, 0), (0.8, 0.9, 0), (1.2, 0.95, 20), (0, 1, 0)])
def test_both_samplers_draw_the_same_tokens(one, temperature, top_p, top_k):
    sampling = Sampling(temperature, top_p, top_k, 30, STOPS)
    asked = [Request(p, stream_key(0, 4, p.id), 64) for p in prompts()]
    reference = make_engine(*one).generate(asked, sampling)
    fused = make_engine(*one, sample=fused_sampling.sample_tokens).generate(asked, sampling)
    for a, b in zip(reference, fused, strict=True):
        assert same_tokens(a, b) >= 0.98  # the rest is a uniform within rounding of a step of the CDF
        for x, y in zip(a.rollouts, b.rollouts, strict=True):
            if torch.equal(x.token_ids, y.token_ids):
                torch.testing.assert_close(x.log_probs, y.log_probs, atol=1e-5, rtol=0)


def test_a_row_without_a_distribution_is_told(one):
    def like_cuda(logits, *_):
        rows = logits.shape[0]
        return torch.arange(rows) - 1, torch.full((rows,), float("nan"))

    with pytest.raises(ValueError, match=r"NaN, \+inf or nothing above -inf"):
        make_engine(*one, sample=like_cuda).generate([Request(prompts()[0], 1, 4)], Sampling(1, 1, 0, 5, ()))


def test_siblings_and_steps_differ(one):
    engine = make_engine(*one)
    sampling = Sampling(1.5, 1, 0, 12, ())
    prompt = prompts()[1]
    (a,) = engine.generate([Request(prompt, stream_key(0, 0, prompt.id), 512)], sampling)
    (b,) = engine.generate([Request(prompt, stream_key(0, 1, prompt.id), 512)], sampling)
    first = {tuple(r.token_ids.tolist()) for r in a.rollouts}
    assert len(first) == 512  # twelve free tokens: no sibling repeats another
    assert not first & {tuple(r.token_ids.tolist()) for r in b.rollouts}
    (again,) = engine.generate([Request(prompt, stream_key(0, 0, prompt.id), 512)], sampling)
    assert same_tokens(a, again) == 1.0


def test_first_token_frequencies_follow_the_softmax(one):
    engine = make_engine(*one)
    prompt = prompts()[0]
    n = 20_000
    engine.max_rows = n
    (group,) = engine.generate([Request(prompt, 5, n)], Sampling(2.0, 1, 0, 1, ()))
    with torch.no_grad():
        expected = (one[1](torch.tensor([prompt.token_ids])).logits[0, -1].double() / 2.0).softmax(-1)
    counts = torch.bincount(torch.cat([r.token_ids for r in group.rollouts]), minlength=tiny.VOCAB)
    # Rare tokens are pooled, so that every expected count is at least 5.
    rare = expected * n < 5
    observed = torch.cat((counts[~rare], counts[rare].sum()[None])).double()
    means = torch.cat((expected[~rare], expected[rare].sum()[None])) * n
    chi_square = ((observed - means).square() / means.clamp(min=1e-9)).sum()
    degrees = len(means) - 1
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5  # four standard deviations


def test_update_is_all_or_nothing(one):
    directory, model = one
    engine = make_engine(directory, model)
    weights = [(n, p) for n, p in model.state_dict().items() if n in engine.names]
    sampling = Sampling(0, 1, 0, 5, ())
    request = [Request(prompts()[0], 1, 1)]
    (before,) = engine.generate(request, sampling)
    for broken, message in [
        (weights[:-1], "1 tensors missing"),
        ([*weights, weights[0]], "sent twice"),
        ([("model.other", weights[0][1])], "unknown"),
        ([(weights[0][0], weights[0][1][:-1])], "has shape"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.update_weights([(n, p * 2) for n, p in broken], version=4)
    (after,) = engine.generate(request, sampling)
    assert after.version == 3
    assert same_tokens(before, after) == 1.0


def test_sleep_drops_the_weights(one):
    engine = make_engine(*one)
    engine.sleep()
    engine.wake()
    with pytest.raises(RuntimeError, match="no weights"):
        engine.generate([Request(prompts()[0], 1, 1)], Sampling(1, 1, 0, 5, ()))


def test_context_overflow_is_told(one):
    with pytest.raises(UserError, match="exceeds the model's context of 256"):
        make_engine(*one).generate([Request(prompts()[0], 1, 1)], Sampling(1, 1, 0, 254, ()))
