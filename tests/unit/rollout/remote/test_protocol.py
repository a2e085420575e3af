"""Tests of the messages between trainer and engine process."""

from __future__ import annotations

import json

import pytest
import torch

from megatron_brorl.rollout.remote.protocol import Completion, Message, ProtocolError, decode, encode


def test_messages_survive_encoding():
    sent = Message(
        "generate",
        {"call": 3, "temperature": 0.1, "names": ["a", "ü"]},
        {"ids": torch.tensor([1, -(2**62), 5]), "none": torch.empty(0, dtype=torch.int64), "lp": torch.tensor([-0.1])},
    )
    decoded = decode(encode(sent))
    assert (decoded.kind, decoded.fields) == (sent.kind, sent.fields)
    assert decoded.tensors.keys() == sent.tensors.keys()
    for name, tensor in sent.tensors.items():
        assert decoded.tensors[name].dtype == tensor.dtype
        assert torch.equal(decoded.tensors[name], tensor)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: [f[0].replace(b'"protocol": 8', b'"protocol": 9'), f[1]], "different protocols (9 and 8)"),
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


@pytest.mark.parametrize(
    ("reason", "finish"), [("stop", "stop"), ("length", "length"), ("abort", "cut"), (None, "cut")]
)
def test_completion_has_the_log_probs_of_sampled_tokens(reason, finish):
    assert Completion.of((4, 5), reason, [{4: -1.0, 9: -0.5}, {5: -2.0}]) == Completion([4, 5], finish, [-1.0, -2.0])
    with pytest.raises(ValueError, match="no log-prob of the sampled token 5"):
        Completion.of((4, 5), reason, [{4: -1.0}, {6: -2.0}])
    with pytest.raises(ValueError, match="1 log-probs for 2 tokens"):
        Completion.of((4, 5), reason, [{4: -1.0}])
