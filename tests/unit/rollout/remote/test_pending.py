"""Tests of the rollouts that a rank requests from an engine process."""

from __future__ import annotations

import json
from dataclasses import replace

import fakes
import pytest
import torch

from megatron_brorl.errors import UserError
from megatron_brorl.rollout.engine import Request, Sampling
from megatron_brorl.rollout.remote.pending import PendingRollouts, sibling_seed
from megatron_brorl.rollout.remote.protocol import Message, decode, encode
from megatron_brorl.rollout.remote.remote_engine import _check_stop_strings
from megatron_brorl.types import Episode, Rollout


def test_seeds_of_siblings_differ_in_the_half_that_cpu_generators_read():
    seeds = [sibling_seed(7, i, 0) for i in range(4096)]
    assert len({seed & 0xFFFFFFFF for seed in seeds}) == 4096
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len({sibling_seed(7, i, 5) for i in range(4096)} & set(seeds)) == 0


@pytest.mark.parametrize(
    ("ids", "log_probs", "finish", "fault"),
    [
        ([5, 50], [-1.0, -1.0], "stop", "token 50 outside the vocabulary of 50"),
        ([5, -1], [-1.0, -1.0], "stop", "token -1 outside the vocabulary of 50"),
        ([5, 2], [-1.0], "stop", "1 log-probabilities for 2 tokens"),
        ([5, 2], [-1.0, float("nan")], "stop", "or NaN among them"),
        ([5] * 13, [-1.0] * 13, "length", "13 tokens where 12 were requested"),
        ([5, 2], [-1.0, -1.0], "tired", 'unknown finish reason "tired"'),
    ],
)
def test_invalid_answer_loses_only_its_rollout(ids, log_probs, finish, fault):
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=12, stop_ids=(2,))
    pending = PendingRollouts(sampling, callbacks=None, supply=None, max_in_flight=5, vocab=50)
    pending.add([Request(fakes.prompts(1)[0], key=4, n=2)])
    for number, (i, p, f) in enumerate([(ids, log_probs, finish), ([7, 2], [-1.0, -2.0], "stop")]):
        tensors = {"ids": torch.tensor(i), "log_probs": torch.tensor(p)}
        pending.answered(Message("rollout", {"number": number, "finish": f}, tensors), version=4)
    assert len(pending.faults) == 1
    assert fault in pending.faults[0]
    assert [(r.token_ids.tolist(), r.finish) for r in pending.result()[0]] == [([], "cut"), ([7, 2], "stop")]


def test_stop_strings_end_rollouts_as_in_the_built_in_engine():
    """An engine may find a stop string too late, or overlook one that starts in earlier tokens."""
    text = lambda ids: "".join(chr(97 + int(i)) for i in ids)  # noqa: E731  token 0 is the letter a
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=12, stop_ids=(25,), stop_strings=("bcd", "xx"))
    begun = Rollout(3, torch.tensor([0, 1]), torch.tensor([-0.5, -1.5]), "cut", ((3, 2),))
    pending = PendingRollouts(sampling, callbacks=None, supply=None, max_in_flight=8, vocab=50, decode=text)
    episode = Episode(torch.tensor([True, True, True, False]), 1)
    turn = Rollout(4, torch.tensor([1, 2, 3, 1]), torch.zeros(4), "cut", ((3, 4),), episode)
    pending.add([Request(fakes.prompts(1)[0], key=4, n=5, begun=(begun, turn))])
    for number, (added, finish) in enumerate(
        [
            ([1, 2, 3, 9, 9], "stop"),  # two tokens too many
            ([1, 2, 9, 25], "stop"),  # a stop token
            ([1, 2, 9], "stop"),  # neither a stop string nor a stop token
            ([2, 3, 7] + [8] * 7, "length"),  # continues a rollout that ended with "b"
            ([2, 3, 1, 2, 3, 9], "stop"),  # a turn after a turn "bcd" and an observation "b"
        ]
    ):
        tensors = {"ids": torch.tensor(added), "log_probs": -torch.arange(1.0, len(added) + 1)}
        pending.answered(Message("rollout", {"number": number, "finish": finish}, tensors), version=4)
    (rollouts,) = pending.result()
    assert [(r.token_ids.tolist(), r.log_probs.tolist(), r.finish, r.spans) for r in rollouts] == [
        ([1, 2, 3], [-1.0, -2.0, -3.0], "stop", ((4, 3),)),
        ([1, 2, 9, 25], [-1.0, -2.0, -3.0, -4.0], "stop", ((4, 4),)),
        ([], [], "cut", ()),
        ([0, 1, 2, 3], [-0.5, -1.5, -1.0, -2.0], "stop", ((3, 2), (4, 2))),
        ([1, 2, 3, 1, 2, 3, 1, 2, 3], [0.0] * 4 + [-1.0, -2.0, -3.0, -4.0, -5.0], "stop", ((3, 4), (4, 5))),
    ]
    assert rollouts[4].episode is episode
    assert pending.faults == ["it ended at a stop string, but its text contains none"]


def test_routes_replace_those_of_earlier_calls_and_end_with_the_rollout():
    text = lambda ids: "".join(chr(97 + int(i)) for i in ids)  # noqa: E731  token 0 is the letter a
    sampling = Sampling(
        temperature=1.0, top_p=1.0, top_k=0, max_tokens=12, stop_ids=(25,), stop_strings=("bc",), routes=True
    )
    request = Request(fakes.prompts(1)[0], key=4, n=3)
    prompt = len(request.prompt.token_ids)
    begun = Rollout(0, torch.tensor([7, 8]), torch.zeros(2), "cut", ((3, 2),), routes=torch.zeros(prompt + 1, 2, 3))
    pending = PendingRollouts(sampling, callbacks=None, supply=None, max_in_flight=8, vocab=50, decode=text)
    pending.add([replace(request, begun=(begun,))])
    routes = torch.randint(0, 300, (prompt + 5, 2, 3), dtype=torch.int16)
    # The first answer continues a rollout and has a token too many, the second is cancelled, the third lacks a row.
    for number, (ids, finish, rows) in enumerate([([1, 2, 9], "stop", 4), ([], "cut", -1), ([5, 6], "length", 0)]):
        sent = routes[: prompt + rows]
        tensors = {"ids": torch.tensor(ids, dtype=torch.int64), "log_probs": torch.zeros(len(ids))}
        fields = {"number": number, "finish": finish, "routes": list(sent.shape)}
        answer = Message("rollout", fields, {**tensors, "routes": sent.flatten()})
        pending.answered(decode(encode(answer)), version=4)
    first, second, third = pending.result()[0]
    assert first.token_ids.tolist() == [7, 8, 1, 2]
    assert torch.equal(first.routes, routes[: prompt + 3])
    assert (len(second.token_ids), second.routes) == (0, None)
    assert (len(third.token_ids), third.routes) == (0, None)
    assert pending.faults == [f"routes of {prompt} tokens where {prompt + 1} were computed"]


@pytest.mark.parametrize(
    ("strings", "decoder", "fault"),
    [
        (["x"], None, None),
        (["x"], "missing", "has none"),
        ([" x"], {"type": "ByteLevel"}, None),
        (["x", " y"], {"type": "Metaspace"}, "' y' begins with a space"),
        ([" x"], None, "' x' begins with a space"),
        ([], "missing", None),
    ],
)
def test_stop_strings_that_the_engine_would_miss_are_refused(tmp_path, strings, decoder, fault):
    if decoder != "missing":
        (tmp_path / "tokenizer.json").write_text(json.dumps({"decoder": decoder}))
    if fault is None:
        _check_stop_strings(strings, "vLLM", tmp_path)
        return
    with pytest.raises(UserError, match=f"^rollout.stop_strings: .*{fault}"):
        _check_stop_strings(strings, "vLLM", tmp_path)
