"""Rollouts of several turns, with an environment in this process whose replies the tests choose."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import tiny
import torch
from unit.rollout.native.test_torch_engine import STOPS, Drawer, make_engine, prompts

from megatron_brorl.config.schema import EnvironmentConfig
from megatron_brorl.environments.pool import Reply
from megatron_brorl.families.shape import read_shape
from megatron_brorl.ops.philox import stream_key
from megatron_brorl.rewards.registry import ENVIRONMENT
from megatron_brorl.rollout.engine import Request, Sampling
from megatron_brorl.rollout.native.pages import page_bytes
from megatron_brorl.rollout.turns import TurnEngine
from megatron_brorl.types import ScoreResult

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=40, stop_ids=STOPS)
FIRST = {"p0": "", "p1": "9 2 14"}  # observations before the first turn, by prompt; "31" for other prompts


def text_of(ids) -> str:
    return " ".join(str(int(i)) for i in ids)


def tokens_of(messages, after_stop=True) -> list[int]:
    return [int(i) for message in messages for i in message["content"].split()]


TEXTS = text_of, tokens_of  # decode and encode of TurnEngine


def observation(text: str) -> Reply:
    return Reply(({"role": "user", "content": text},), done=False, score=None)


def answer(text: str, last: bool) -> Reply:
    """End at a turn whose sum is a multiple of 5. Observations are of one to four tokens, which may be stop tokens."""
    total = sum(map(int, text.split()))
    if last or total % 5 == 0:
        return Reply((), done=True, score=ScoreResult(total / 7, "ok"), calls=1)
    words = [2 + (7 * total + 13 * i) % (tiny.VOCAB - 2) for i in range(1 + total % 4)]
    return replace(observation(text_of(words)), calls=2, malformed=total % 2)


@dataclass
class Pool:
    """Environments, and callbacks of generate. With a delay, every `delay`-th call of `cancelled` sends the replies."""

    delay: int = 0
    answer: Any = answer  # If it returns None, the environment does not reply.
    polls: int = 0
    undelivered: list[Any] = field(default_factory=list)
    steps: dict[int, list[tuple[str, bool]]] = field(default_factory=dict)  # of each episode
    ended: list[int] = field(default_factory=list)
    in_thought: list[bool] = field(default_factory=list)  # of each step

    def reset(self, episode, row, send):
        self.steps[episode] = []
        self.queue(send, observation(FIRST.get(row["id"], "31")))

    def step(self, episode, text, last, send, in_thought=False):
        self.steps[episode].append((text, last))
        self.in_thought.append(in_thought)
        self.queue(send, self.answer(text, last))

    def end(self, episode):
        self.ended.append(episode)

    def queue(self, send, reply):
        self.undelivered += [(send, reply)] if reply else []
        if not self.delay:
            self.deliver()

    def deliver(self):
        while self.undelivered:
            send, reply = self.undelivered.pop()
            send(reply)

    def finished(self, request, rollout):
        assert rollout.finish != "cut"

    def cancelled(self):
        self.polls += 1
        if self.delay and self.polls % self.delay == 0:
            self.deliver()
        return False


def requests(n=6, lengths=(3, 60, 9, 62)):
    return [Request(replace(p, verifier=ENVIRONMENT), key=stream_key(0, 4, p.id), n=n) for p in prompts(lengths)]


def sample(model, pool, batch=None, sampling=SAMPLING, supply=None, max_rows=1000, pages=0, texts=TEXTS, **config):
    """Return the rollouts of all requests in one list."""
    memory = pages * page_bytes(read_shape(model[0]), torch.float32)
    inner = make_engine(*model, max_rows, memory=memory, decode=texts[0])
    engine = TurnEngine(inner, pool, EnvironmentConfig(factory="e:E", **config), *texts)
    return [r for group in engine.generate(batch or requests(), sampling, pool, supply) for r in group]


def facts(rollout):
    episode = rollout.episode
    tokens = list(zip(rollout.token_ids.tolist(), episode.sampled.tolist(), strict=True))
    return tokens, rollout.finish, episode.turns, episode.calls, episode.malformed, episode.score.reward


def check_equal(rollouts, expected, tolerance=1e-5):
    for a, b in zip(rollouts, expected, strict=True):
        assert (a.index, facts(a)) == (b.index, facts(b))
        torch.testing.assert_close(a.log_probs, b.log_probs, atol=tolerance, rtol=0)


def played(model, prompt, sampling, max_turns):
    """Return the facts of a greedy rollout and its steps, by generate() of transformers for every turn."""
    tokens = [(int(i), False) for i in FIRST.get(prompt.id, "31").split()]
    steps, replies = [], []
    for turn in range(1, max_turns + 1):
        room = sampling.max_tokens - len(tokens)
        context = torch.tensor([[*prompt.token_ids, *(i for i, _ in tokens)]])
        settings = {"do_sample": False, "max_new_tokens": room, "eos_token_id": list(STOPS), "pad_token_id": 0}
        ids = model.generate(context, attention_mask=torch.ones_like(context), **settings)[0, context.shape[1] :]
        tokens += [(i, True) for i in ids.tolist()]
        stopped = int(ids[-1]) in STOPS
        steps.append((text_of(ids[: len(ids) - stopped]), turn == max_turns or not stopped))
        replies.append(answer(*steps[-1]))
        observed = [(i, False) for i in tokens_of(replies[-1].messages)]
        if replies[-1].done or len(tokens) + len(observed) >= sampling.max_tokens:
            break
        tokens += observed
    counts = turn, sum(r.calls for r in replies), sum(r.malformed for r in replies)
    finish = "stop" if replies[-1].done and stopped else "length"
    reward = getattr(replies[-1].score, "reward", 0.0)
    return (tokens, finish, *counts, reward), steps


@pytest.mark.parametrize("max_turns", [8, 3])
def test_greedy_turns_equal_transformers(model, max_turns):
    greedy = replace(SAMPLING, temperature=0.0)
    prompt_requests = requests(n=1, lengths=range(1, 30))
    pool = Pool()
    sampled = [facts(r) for r in sample(model, pool, prompt_requests, greedy, max_turns=max_turns)]
    expected, steps = zip(
        *(played(model[1], request.prompt, greedy, max_turns) for request in prompt_requests), strict=True
    )
    assert sampled == list(expected)
    assert list(pool.steps.values()) == list(steps)
    assert len({(finish, turns) for _, finish, turns, *_ in expected}) >= 2


@pytest.fixture(scope="module")
def whole(model):
    """The rollouts of requests(), sampled in one batch with environments that answer at once."""
    return sample(model, Pool())


def test_log_probs_are_those_of_transformers(model, whole):
    exact = copy.deepcopy(model[1]).double()
    for prompt, rollout in zip([r.prompt.token_ids for r in requests() for _ in range(6)], whole, strict=True):
        expected = tiny.log_probs(exact, prompt, rollout.token_ids) * rollout.episode.sampled
        torch.testing.assert_close(rollout.log_probs, expected.float(), atol=1e-5, rtol=0)
        assert rollout.spans == ((3, len(rollout.token_ids)),)


# Seven pages hold the longest prompt with one rollout, but not other prompts next to it. With these delays, a row then
# needs the pages of prompts whose rollouts wait.
BATCHES = [(1, 0, (0, 1)), (5, 0, (0, 3)), (24, 0, (3, 7)), (24, 18, (0, 3)), (24, 7, (5, 7))]


@pytest.mark.parametrize(("rows", "pages", "delays"), BATCHES)
def test_tokens_depend_neither_on_the_batch_nor_on_the_order_or_delay_of_replies(model, whole, rows, pages, delays):
    assert max(r.episode.turns for r in whole) >= 3
    assert {r.finish for r in whole} == {"stop", "length"}
    pools = [Pool(delay) for delay in delays]
    first, second = (sample(model, pool, max_rows=rows, pages=pages) for pool in pools)
    check_equal(first, whole)
    check_equal(first, second, tolerance=0.0)
    unanswered = sum(r.episode.score.status == "no_answer" for r in whole)
    assert unanswered > 0
    assert all(len(set(pool.ended)) == unanswered for pool in pools)


def test_tokens_do_not_depend_on_the_split_over_ranks(model, whole):
    """Each of two ranks has some of its rollouts from the start and requests others from a supply."""
    by_sibling = {}
    for rank in range(2):
        given = [replace(r, n=1, first=first) for r in requests() for first in (0, 1)][rank::2]
        supplied = [replace(r, n=2, first=first) for r in requests() for first in (2, 4)][rank::2]
        rollouts = sample(model, Pool(delay=2), given, supply=Drawer(supplied, rows=8), max_rows=5)
        prompts = [request.prompt.id for request in given + supplied for _ in range(request.n)]
        by_sibling |= {(prompt, r.index): r for prompt, r in zip(prompts, rollouts, strict=True)}
    check_equal([by_sibling[key] for key in sorted(by_sibling)], whole)


def test_a_stop_string_of_an_earlier_turn_does_not_end_a_turn(model):
    letters = lambda ids: "".join(chr(97 + int(i) % 3) for i in ids)  # noqa: E731  token t is letter t % 3 of abc
    end = Reply((), done=True, score=ScoreResult(1.0, "ok"))
    pool = Pool(answer=lambda text, last: end if last else observation("3 98"))
    strings = replace(SAMPLING, stop_ids=(), stop_strings=("ab",))
    sample(model, pool, requests(n=20), strings, texts=(letters, tokens_of), max_turns=5)
    texts = [text for steps in pool.steps.values() for text, last in steps if not last]
    assert len(texts) > 50
    assert all(text.index("ab") == len(text) - 2 for text in texts)


def test_a_lost_environment_and_a_first_observation_without_room_lose_the_rollout(model, whole, capsys):
    gone = Reply((), done=True, score=None, lost="environment lost: no answer in 1 s")
    rollouts = sample(model, Pool(answer=lambda text, last: gone if text.endswith("8") else answer(text, last)))
    lost = [r for r in rollouts if r.finish == "cut"]
    assert 0 < len(lost) < 24
    assert {r.episode.score.reason for r in lost} == {gone.lost}
    pairs = [(a, b) for a, b in zip(rollouts, whole, strict=True) if a.finish != "cut"]
    check_equal(*zip(*pairs, strict=True))
    assert f"e:E: {len(lost)} rollouts are lost, for example: {gone.lost}" in capsys.readouterr().err

    short = sample(model, Pool(), [replace(requests()[1], n=2)], replace(SAMPLING, max_tokens=3))
    assert [(r.finish, len(r.token_ids)) for r in short] == [("cut", 0)] * 2  # The observation of p1 has 3 tokens.


def test_a_call_that_is_cancelled_while_environments_work_ends_them(model):
    pool = Pool(answer=lambda text, last: None)
    pool.cancelled = lambda: sum(map(len, pool.steps.values())) == 24  # every rollout waits for its environment
    assert [(r.finish, r.episode.turns, r.episode.score) for r in sample(model, pool)] == [("cut", 1, None)] * 24
    assert sorted(pool.ended) == sorted(pool.steps)


def test_prompts_of_another_verifier_are_sampled_in_one_turn(model):
    probes = [replace(r, prompt=replace(r.prompt, verifier="exact")) for r in requests()]
    pool = Pool()
    expected = [r for group in make_engine(*model).generate(probes, SAMPLING) for r in group]
    assert [r.token_ids.tolist() for r in sample(model, pool, probes)] == [r.token_ids.tolist() for r in expected]
    assert not pool.steps


def test_a_turn_after_a_think_tag_begins_in_a_thought(model):
    """Two tokens decode to the tag: the last one of p0's prompt, and 14, the last one of p1's first observation."""
    prompt_requests = requests(n=1)
    tags = {prompt_requests[0].prompt.token_ids[-1], 14}
    pool = Pool(answer=lambda text, last: Reply((), done=True, score=ScoreResult(0.0, "ok")))
    decode = lambda ids: "<think>\n" if len(ids) and int(ids[-1]) in tags else text_of(ids)  # noqa: E731
    sample(model, pool, prompt_requests, texts=(decode, tokens_of))
    assert sorted(pool.in_thought) == [False, False, True, True]


def test_an_observation_after_a_stop_string_begins_with_the_stop_token(model):
    sampling = replace(SAMPLING, stop_strings=("5",))
    encode = lambda messages, after_stop: [*([] if after_stop else STOPS[:1]), 99, *tokens_of(messages)]  # noqa: E731
    cases = set()
    for rollout in sample(model, Pool(), sampling=sampling, texts=(text_of, encode)):
        tokens, sampled = rollout.token_ids.tolist(), rollout.episode.sampled.tolist()
        for i in range(1, len(tokens)):
            if sampled[i - 1] and not sampled[i]:
                stopped = tokens[i - 1] in STOPS
                assert tokens[i : i + 2 - stopped] == [*([] if stopped else STOPS[:1]), 99]
                cases.add(stopped)
    assert cases == {True, False}
