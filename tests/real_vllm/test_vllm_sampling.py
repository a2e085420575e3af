"""Tests of the samples of the real vLLM: distribution, seeds, ends of responses, and turns."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from contract.engines import PROMPT
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from unit.rollout.test_turns import Pool, answer, facts, text_of, tokens_of
from vllm_engines import SAMPLING, Model, draw, tokens

from megatron_brorl.config.schema import EnvironmentConfig
from megatron_brorl.ops.reference.sampling import sampling_log_probs
from megatron_brorl.rollout.engine import Request
from megatron_brorl.rollout.turns import TurnEngine


def test_log_probs_are_those_of_transformers(model, shared):
    rollouts = draw(shared, n=64)
    assert [r.index for r in rollouts] == list(range(64))
    assert model.gap(rollouts) < 1e-4
    for rollout in rollouts:
        assert rollout.finish == ("stop" if rollout.token_ids[-1] == 2 else "length")
        assert 2 not in rollout.token_ids[:-1].tolist()
        assert rollout.spans == ((0, len(rollout.token_ids)),)
    assert {r.finish for r in rollouts} == {"stop", "length"}


def test_samples_depend_only_on_key_and_index(shared):
    """Siblings differ unless they are short, and do not depend on order and number of the requests."""
    whole = tokens(draw(shared, n=512))
    long = [tuple(x) for x in whole if len(x) > 4]
    assert len(long) > 400
    assert len(set(long)) == len(long)
    assert tokens(draw(shared, n=3, first=200)) == whole[200:203]
    second, first = shared.generate([Request(PROMPT, key=11, n=256, first=sibling) for sibling in (256, 0)], SAMPLING)
    assert tokens(first) + tokens(second) == whole
    assert not set(long) & {tuple(x) for x in tokens(draw(shared, n=512, key=12))}


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(0.7, 1.0, 0), (1.0, 0.8, 0), (1.3, 0.9, 12)])
def test_log_probs_are_of_the_sampling_distribution(model, shared, temperature, top_p, top_k):
    rollouts = draw(shared, n=24, sampling=replace(SAMPLING, temperature=temperature, top_p=top_p, top_k=top_k))
    for rollout in rollouts:
        logits = model.logits(rollout)
        expected = sampling_log_probs(logits, temperature, top_p, top_k).gather(-1, rollout.token_ids[:, None])[:, 0]
        torch.testing.assert_close(rollout.log_probs, expected, atol=1e-4, rtol=0)


def test_cut_rollouts_continue(model, shared):
    """Responses are cut at tokens_per_call and continue in a second call."""
    begun = draw(shared, n=8, sampling=replace(SAMPLING, tokens_per_call=5))
    assert all(r.finish == "cut" and len(r.token_ids) == 5 for r in begun if 2 not in r.token_ids.tolist())
    unfinished = tuple(r for r in begun if r.finish == "cut")
    (ended,) = shared.generate([Request(PROMPT, key=11, n=8, begun=tuple(begun))], SAMPLING)
    assert model.gap(ended) < 1e-4
    for before in unfinished:
        after = ended[before.index]
        assert torch.equal(after.token_ids[:5], before.token_ids)
        assert len(after.token_ids) > 5


def test_cancelled_rollouts_keep_their_tokens(model, shared):
    class Impatient:
        """Cancel when a late rollout has finished.

        vLLM starts rollouts in order, so unfinished rollouts before the late one have at least one token.
        """

        ended = threading.Event()

        def finished(self, request, rollout):
            if rollout.index >= 256 and len(rollout.token_ids) > 1:
                self.ended.set()

        def cancelled(self):
            return self.ended.is_set()

    # More rollouts than vLLM computes together, so that some are in flight when it receives the cancellation.
    rollouts = draw(shared, n=2048, key=3, callbacks=Impatient(), sampling=replace(SAMPLING, max_tokens=60))
    cut = [r for r in rollouts if r.finish == "cut"]
    begun = [r for r in cut if len(r.token_ids)]
    assert begun
    assert model.gap(begun) < 1e-4
    (ended,) = shared.generate([Request(PROMPT, key=3, n=2048, begun=tuple(cut))], replace(SAMPLING, max_tokens=60))
    assert all(torch.equal(ended[r.index].token_ids[: len(r.token_ids)], r.token_ids) for r in rollouts)
    assert all(r.finish in ("stop", "length") for r in ended)


def test_stop_strings_end_a_response_with_the_token_that_completes_them(start, tmp_path):
    """The tokenizer has one character per token."""
    model = Model(tmp_path, "llama", tied=True)
    vocab = {chr(0x4E00 + i): i for i in range(model.shape.vocab)}
    library = Tokenizer(models.WordLevel(vocab, unk_token=chr(0x4E00)))
    library.pre_tokenizer, library.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=library).save_pretrained(tmp_path)

    # Stop strings of two tokens and of one token.
    stops = ([9, 30], [11], [40], [55], [70])
    strings = tuple("".join(chr(0x4E00 + i) for i in stop) for stop in stops)
    decode = lambda ids: "".join(chr(0x4E00 + int(i)) for i in ids)  # noqa: E731
    engine = start(model, options={"stop_strings": strings, "max_rows": 64}, decode=decode)
    engine.update_weights(model.stream(), version=0)
    rollouts = draw(engine, n=128, sampling=replace(SAMPLING, stop_strings=strings))
    assert model.gap(rollouts) < 1e-4
    stopped = 0
    for ids in tokens(rollouts):
        end_lengths = [i + len(stop) for stop in stops for i in range(len(ids)) if ids[i : i + len(stop)] == stop]
        end_lengths += [i + 1 for i, token in enumerate(ids) if token == 2]
        assert len(ids) == min([*end_lengths, 24])  # 24: SAMPLING.max_tokens
        stopped += len(ids) < 24
    assert stopped > 10


def test_turns_continue_from_their_prefix_in_any_batch(model, start):
    stops = tuple(range(2, 12))
    inner = start(model, options={"stop_ids": stops})
    inner.update_weights(model.stream(), version=0)
    engine = TurnEngine(inner, Pool(), EnvironmentConfig(factory="e:E", max_turns=4), text_of, tokens_of)
    request = Request(replace(PROMPT, verifier="environment"), key=11, n=32)
    sampling = replace(SAMPLING, max_tokens=48, stop_ids=stops)
    (rollouts,) = engine.generate([request], sampling)
    second, first = engine.generate([replace(request, n=20, first=12), replace(request, n=12)], sampling)
    assert [facts(r) for r in first + second] == [facts(r) for r in rollouts]
    for rollout in rollouts:
        expected = model.logits(rollout).log_softmax(-1).gather(-1, rollout.token_ids[:, None])[:, 0]
        torch.testing.assert_close(rollout.log_probs, expected * rollout.episode.sampled, atol=1e-4, rtol=0)
        _first_observation, *parts = [ids.tolist() for _, ids in rollout.parts()]
        for turn, observation in zip(parts[::2], parts[1::2], strict=False):
            assert observation == tokens_of(answer(text_of(turn[:-1]), last=False).messages)
    assert {r.episode.turns for r in rollouts} >= {1, 2, 3}
