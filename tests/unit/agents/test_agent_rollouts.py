"""Agents on the built-in engine, through HTTP and the openai package."""

from __future__ import annotations

import asyncio
import contextlib
import random
from itertools import pairwise

import pytest
import tiny
import torch
from unit.data.test_call_formats import template
from unit.data.test_tokenizers import make_hf
from unit.rollout.native.test_torch_engine import make_engine

from megatron_brorl.cli.agent import Agent
from megatron_brorl.config.schema import AgentConfig, Config, RewardConfig, RolloutConfig
from megatron_brorl.data.tokenizers import load_tokenizer
from megatron_brorl.ops.philox import stream_key
from megatron_brorl.rollout.engine import Request, Sampling
from megatron_brorl.types import Prompt

TEMPLATE = template('<tool_call>\n{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}\n</tool_call>')
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=12, stop_ids=(1,), shares_prefixes=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    module = tiny.make_model(directory, "qwen2", tied=True, vocab_size=304, bos_token_id=0, eos_token_id=1)
    make_hf(directory, chat_template=TEMPLATE)
    return directory, module


def agent_engine(directory, inner, function=None, format="hermes", sampling=SAMPLING, prompt_tokens=240, **keys):
    """Return an engine that runs an agent. prompt_tokens: limit of a prompt. keys: of the section [agent]."""
    sections = {"reward": RewardConfig(workers=1), "rollout": RolloutConfig(max_tokens=sampling.max_tokens)}
    config = Config(agent=AgentConfig(**{"function": "f.py:f", **keys}), **sections)
    agent = Agent(config, function, "", load_tokenizer(directory), format)
    return agent.engine(inner, context=prompt_tokens + sampling.max_tokens)


@contextlib.contextmanager
def agents(model, function, max_rows=1000, inner=None):
    """Yield a function that runs an agent n times on each of some rows, and returns the rollouts in one list.

    inner: an engine in place of the built-in one.
    """
    inner = inner or make_engine(*model, max_rows, decode=load_tokenizer(model[0]).decode_all)
    with contextlib.closing(agent_engine(model[0], inner, function)) as engine:

        def run(n=4, questions=("1 + 2", "hello")):
            prompts = [Prompt(q, text=q, token_ids=(5,), answer=None, verifier="exact") for q in questions]
            requests = [Request(p, stream_key(0, 4, p.id), n) for p in prompts]
            return [r for group in engine.generate(requests, SAMPLING) for r in group]

        yield run


def rows(rollout):
    """Return (token ids, mask of the sampled ones, log-probs) of each sequence of a rollout."""
    parts = [slice(*ends) for ends in pairwise((*rollout.episode.starts, len(rollout.token_ids)))]
    return [(rollout.token_ids[part], rollout.episode.sampled[part], rollout.log_probs[part]) for part in parts]


def check_log_probs(model, rollouts):
    for r in rollouts:
        for ids, sampled, log_probs in rows(r):
            with torch.no_grad():
                logits = model[1](ids[None]).logits[0].double().log_softmax(-1)
            expected = logits[:-1].gather(1, ids[1:, None])[:, 0]
            torch.testing.assert_close(log_probs[1:].double()[sampled[1:]], expected[sampled[1:]], atol=1e-4, rtol=0)
            assert not sampled[0]


async def ask(client, messages, **options):
    return (await client.chat.completions.create(model="policy", messages=messages, **options)).choices[0].message


async def chat(row, client):
    messages = [{"role": "user", "content": row["prompt"]}]
    for _ in range(3):
        reply = await ask(client, messages)
        messages += [reply.model_dump(), {"role": "user", "content": "again?"}]
    return len(messages)


def test_log_probs_of_all_tokens_are_those_of_transformers(model):
    """Later calls keep the sampled tokens, although encoding the text of most completions gives other tokens."""
    with agents(model, chat) as run:
        rollouts = run()
    assert len(rollouts) == 8
    for r in rollouts:
        assert r.episode.score.reward == 7  # the number of messages
        assert len(r.episode.starts) == 1  # a single token sequence
        assert r.episode.turns == 3
    check_log_probs(model, rollouts)
    tokenizer = load_tokenizer(model[0])
    first_8_tokens = [r.token_ids[r.episode.sampled][:8].tolist() for r in rollouts]
    assert sum(tokenizer.encode(tokenizer.decode(ids)) != ids for ids in first_8_tokens) > 4  # of 8 rollouts


async def many(row, client):
    await asyncio.gather(*(ask(client, [{"role": "user", "content": str(i)}], max_tokens=3) for i in range(40)))
    return 1


def test_80_concurrent_calls(model):
    with agents(model, many, max_rows=32) as run:
        rollouts = run(n=1)
    assert [r.episode.turns for r in rollouts] == [40] * 2
    check_log_probs(model, rollouts)


async def branches(row, client):
    """Two branches of one call, a second conversation, and a repetition of the first request, in any order."""
    start = [{"role": "user", "content": row["prompt"]}]
    first = await ask(client, start)
    shared = [*start, first.model_dump()]

    async def branch(text):
        messages = [*shared, {"role": "user", "content": text}]
        await asyncio.sleep(random.random() / 50)
        reply = await ask(client, messages, max_tokens=5)
        await asyncio.sleep(random.random() / 50)
        await ask(client, [*messages, reply.model_dump(), {"role": "user", "content": "b"}])

    other = [{"role": "system", "content": "You check."}, {"role": "user", "content": first.content}]
    await asyncio.gather(branch("yes"), branch("no"), ask(client, other, stop=["e", "1"]))
    return 1.0


def test_rollouts_do_not_depend_on_the_order_of_calls(model):
    with agents(model, branches) as run:
        expected = run()
    with agents(model, branches, max_rows=3) as run:
        rollouts = run()
    check_log_probs(model, expected)
    for a, b in zip(expected, rollouts, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.log_probs.tolist() == b.log_probs.tolist()
        assert a.episode.starts == b.episode.starts
        # Three sequences: the first branch, the second one with the first call again, and the other conversation.
        assert len(a.episode.starts) == 3
        assert a.episode.turns == 6


def test_a_sampled_token_is_trained_once(model):
    """The sampled tokens of a rollout are those of its calls, each once and after the prompt of its call."""
    calls = []

    async def record(row, client):
        create = client.chat.completions.create

        async def recorded(**options):
            response = await create(**options)
            calls.append((row["prompt"], response.brorl["prompt_token_ids"], response.brorl["token_ids"]))
            return response

        client.chat.completions.create = recorded
        return await branches(row, client)

    with agents(model, record) as run:
        rollouts = run(n=1)
    trained = []
    for r, question in zip(rollouts, ("1 + 2", "hello"), strict=True):
        for ids, sampled, _ in rows(r):
            span_ends = torch.cat((sampled[:-1] != sampled[1:], torch.tensor([True]))).nonzero()[:, 0] + 1
            for begin, end in span_ends.view(-1, 2).tolist():  # Spans alternate: not sampled, sampled.
                trained.append((question, ids[:begin].tolist(), ids[begin:end].tolist()))
    assert sorted(trained) == sorted(calls)
