"""Tests of the messages between trainer and engine process, and of check_sampling."""

from __future__ import annotations

import asyncio
import json
import random
from types import SimpleNamespace

import pytest
import torch

from megatron_brorl.rollout.remote.protocol import Completion, Message, ProtocolError, check_sampling, decode, encode


def test_messages_survive_encoding():
    sent = Message(
        "generate",
        {"call": 3, "temperature": 0.1, "names": ["a", "ü"]},
        {"ids": torch.tensor([1, -(2**62), 5]), "none": torch.empty(0, dtype=torch.int64), "lp": torch.tensor([-0.1])},
    )
    got = decode(encode(sent))
    assert (got.kind, got.fields) == (sent.kind, sent.fields)
    assert got.tensors.keys() == sent.tensors.keys()
    for name, tensor in sent.tensors.items():
        assert got.tensors[name].dtype == tensor.dtype
        assert torch.equal(got.tensors[name], tensor)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: [f[0].replace(b'"protocol": 7', b'"protocol": 8'), f[1]], "different protocols (8 and 7)"),
        (lambda f: [b"\x00\x01"], "not a message"),
        (lambda f: [json.dumps([1]).encode()], "not a message"),
        (lambda f: f[:1], "0 tensors arrived, the header lists 1"),
        (lambda f: [f[0], f[1][:-1]], "ids has 15 bytes, not 2 of int64"),
    ],
)
def test_invalid_messages_are_refused(spoil, message):
    with pytest.raises(ProtocolError) as caught:
        decode(spoil(encode(Message("rollout", {}, {"ids": torch.tensor([1, 2])}))))
    assert message in str(caught.value)


class Backend:
    """Samples with the seed of each request, with one shared generator, or always the same tokens."""

    def __init__(self, kind, vocab=50, context=40, reports=True):
        self.kind, self.options = kind, SimpleNamespace(vocab=vocab, context=context, stop_ids=(2,))
        self.shared, self.reports, self.asked = random.Random(7), reports, []

    def params(self, sampling, tokens, seed):
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
        return tokens, seed

    def submit(self, ids, params):
        self.asked.append((list(ids), params[0]))
        return params

    async def completion(self, handle):
        tokens, seed = handle
        generator = {"request": random.Random(seed), "shared": self.shared, "deaf": random.Random(7)}[self.kind]
        drawn = [generator.randrange(self.options.vocab) for _ in range(tokens)]
        return Completion.of(drawn, "length", [{token: -1.0} for token in drawn] if self.reports else [])


@pytest.mark.parametrize("kind", ["shared", "deaf"])
def test_an_engine_without_seeds_per_request_is_refused(kind):
    with pytest.raises(ValueError, match="Other 1 ignores the seed of a request: siblings on different engines would"):
        asyncio.run(check_sampling(Backend(kind), "Other 1"))


def test_an_engine_without_log_probs_is_refused():
    with pytest.raises(ValueError, match="Other 1 returns no log-probabilities of sampled tokens"):
        asyncio.run(check_sampling(Backend("request", reports=False), "Other 1"))


def test_sampling_check_fits_in_context_and_vocabulary():
    backend = Backend("request", vocab=3, context=10)
    asyncio.run(check_sampling(backend, "Other 1"))
    assert backend.asked == [([0, 1, 2, 0, 1], 5)] * 3


@pytest.mark.parametrize(
    ("reason", "finish"), [("stop", "stop"), ("length", "length"), ("abort", "cut"), (None, "cut")]
)
def test_completion_has_the_log_probs_of_sampled_tokens(reason, finish):
    assert Completion.of((4, 5), reason, [{4: -1.0, 9: -0.5}, {5: -2.0}]) == Completion([4, 5], finish, [-1.0, -2.0])
    with pytest.raises(ValueError, match="no log-prob of the sampled token 5"):
        Completion.of((4, 5), reason, [{4: -1.0}, {6: -2.0}])
    with pytest.raises(ValueError, match="1 log-probs for 2 tokens"):
        Completion.of((4, 5), reason, [{4: -1.0}])
