"""Rollouts of several turns, with an environment in this process whose replies the test orders."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, ClassVar

import pytest
import tiny
import torch
from unit.rollout.native.test_engine import STOPS, prompts
from unit.rollout.native.test_engine import make_engine as make_native

from megatron_brorl.config.environment import EnvironmentConfig
from megatron_brorl.families.shape import read_shape
from megatron_brorl.ops.philox import stream_key
from megatron_brorl.rewards.registry import ENVIRONMENT
from megatron_brorl.rollout.engine import Request, Sampling
from megatron_brorl.rollout.native.pages import page_bytes
from megatron_brorl.rollout.turns import TurnEngine
from megatron_brorl.types import ScoreResult

SAMPLING = Sampling(1.0, 0.95, 0, 40, STOPS)


@dataclass
class Reply:
    messages: tuple[dict[str, str], ...] = ()
    done: bool = False
    score: ScoreResult | None = None
    calls: int = 0
    malformed: int = 0
    lost: str = ""


def observe(text: str) -> str:
    """Return the observation after a turn: one to four tokens, which may be stop tokens."""
    total = sum(map(int, text.split()))
    return " ".join(str(2 + (7 * total + 13 * i) % (tiny.VOCAB - 2)) for i in range(1 + total % 4))


def first_observation(prompt: str) -> str | None:
    return {"p0": None, "p1": "9 2 14"}.get(prompt, "31")


@dataclass
class Pool:
    """An environment that answers every turn but those whose sum is a multiple of 5.

    Replies wait until the engine has asked `delay` times whether the call is cancelled; then all come, the last first.
    """

    delay: int = 0
    lose: Any = lambda number, text: ""
    asked: int = 0
    held: list[Any] = field(default_factory=list)
    steps: list[tuple[str, bool]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)

    def reset(self, episode, row, reply):
        first = first_observation(row["id"])
        self._hold(reply, Reply(() if first is None else ({"role": "user", "content": first},)))

    def step(self, episode, text, last, reply):
        self.steps.append((text, last))
        lost = self.lose(episode, text)
        total = sum(map(int, text.split()))
        if lost:
            self._hold(reply, Reply(done=True, lost=lost))
        elif last or total % 5 == 0:
            self._hold(reply, Reply((), True, ScoreResult(total / 7, "ok"), calls=1))
        else:
            message = {"role": "user", "content": observe(text)}
            self._hold(reply, Reply((message,), calls=2, malformed=total % 2))

    def _hold(self, reply, answer):
        if self.delay:
            self.held.append((reply, answer))
        else:
            reply(answer)

    def end(self, episode):
        self.ended.append(episode)

    # The callbacks of a call of generate.

    def finished(self, request, rollout):
        assert rollout.finish != "cut"

    def cancelled(self):
        self.asked += 1
        if self.delay and self.asked % self.delay == 0:
            while self.held:
                reply, answer = self.held.pop()
                reply(answer)
        return False


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    return directory, tiny.make_model(directory, "qwen2", True)


def text_of(ids) -> str:
    return " ".join(str(int(i)) for i in ids)


def tokens_of(messages) -> list[int]:
    return [int(i) for message in messages for i in message["content"].split()]


def make_engine(model, pool, max_rows=1000, pages=0, decode=None, **config):
    memory = pages * page_bytes(read_shape(model[0]), torch.float32)
    inner = make_native(*model, max_rows, memory=memory, decode=decode)
    return TurnEngine(inner, pool, EnvironmentConfig(factory="e:E", **config), decode or text_of, tokens_of)


def requests(n=6, lengths=(3, 9, 1, 5)):
    return [Request(replace(p, verifier=ENVIRONMENT), stream_key(0, 4, p.id), n) for p in prompts(lengths)]


def facts(rollout):
    e = rollout.episode
    counts = (e.turns, e.calls, e.malformed, e.score and e.score.reward)
    return rollout.index, rollout.token_ids.tolist(), rollout.finish, e.sampled.tolist(), counts


def played(model, prompt, sampling, max_turns, max_turn_tokens):
    """Return (tokens, mask, finish, turns) of a greedy rollout, by generate() of transformers for every turn."""
    first = first_observation(prompt.id)
    ids = tokens_of([{"content": first}]) if first else []
    mask = [False] * len(ids)
    for turn in range(1, max_turns + 1):
        room = min(sampling.max_tokens - len(ids), max_turn_tokens or sampling.max_tokens)
        context = torch.tensor([[*prompt.token_ids, *ids]])
        settings = {"do_sample": False, "max_new_tokens": room, "eos_token_id": list(STOPS), "pad_token_id": 0}
        new = model.generate(context, attention_mask=torch.ones_like(context), **settings)[
            0, context.shape[1] :
        ].tolist()
        ids += new
        mask += [True] * len(new)
        if new[-1] not in STOPS:
            return ids, mask, "length", turn
        text = text_of(new[:-1])
        if turn == max_turns or sum(map(int, text.split())) % 5 == 0:
            return ids, mask, "stop", turn
        observed = tokens_of([{"content": observe(text)}])
        if len(ids) + len(observed) >= sampling.max_tokens:
            return ids, mask, "length", turn
        ids += observed
        mask += [False] * len(observed)
    raise AssertionError


@pytest.mark.parametrize(("max_turns", "max_turn_tokens"), [(8, 0), (3, 0), (8, 6)])
def test_greedy_turns_equal_transformers(model, max_turns, max_turn_tokens):
    greedy = replace(SAMPLING, temperature=0.0)
    asked = [Request(replace(p, verifier=ENVIRONMENT), 1, 1) for p in prompts(range(1, 30))]
    config = {"max_turns": max_turns, "max_turn_tokens": max_turn_tokens}
    found = [r for (r,) in make_engine(model, Pool(), **config).generate(asked, greedy)]
    expected = [played(model[1], request.prompt, greedy, **config) for request in asked]
    got = [(r.token_ids.tolist(), r.episode.sampled.tolist(), r.finish, r.episode.turns) for r in found]
    assert got == expected
    ends = {(finish, turns) for _, _, finish, turns in expected}
    assert len(ends) >= 2, ends


def test_tokens_depend_neither_on_the_batch_nor_on_the_order_or_delay_of_replies(model):
    expected = [[facts(r) for r in group] for group in make_engine(model, Pool()).generate(requests(), SAMPLING)]
    turns = [r[4][0] for group in expected for r in group]
    assert max(turns) >= 3
    assert len({r[2] for group in expected for r in group}) == 2
    for delay in (0, 3, 7):
        for rows, pages in ((1, 0), (5, 0), (24, 0), (24, 11)):
            pool = Pool(delay)
            found = make_engine(model, pool, rows, pages).generate(requests(), SAMPLING, pool)
            assert [[facts(r) for r in group] for group in found] == expected, (delay, rows, pages)
            no_room = [r for group in found for r in group if r.episode.score.status == "no_answer"]
            assert len(set(pool.ended)) == len(no_room) > 0


def test_prompts_whose_rollouts_wait_make_room_for_another_row(model):
    """Seven pages hold the longest prompt with one rollout, but not other prompts next to it."""
    asked = requests(10, (3, 60, 9, 62))
    expected = [[facts(r) for r in group] for group in make_engine(model, Pool()).generate(asked, SAMPLING)]
    pool = Pool(delay=3)
    found = make_engine(model, pool, 24, pages=7).generate(asked, SAMPLING, pool)
    assert [[facts(r) for r in group] for group in found] == expected


def test_tokens_do_not_depend_on_the_split_over_ranks(model):
    """Each rank has some of its rollouts from the start and claims others from a supply."""
    expected = [[facts(r) for r in group] for group in make_engine(model, Pool()).generate(requests(), SAMPLING)]

    class Shared:
        rows, prompt_tokens = 24, 9
        left: ClassVar[list[Request]] = [replace(r, n=2, first=first) for r in requests() for first in (2, 4)]

        def next_requests(self, room):
            return [self.left.pop()] if self.left and room >= 2 else []

        def has_more(self):
            return bool(self.left)

    asked = [replace(r, n=1, first=first) for r in requests() for first in (0, 1)]
    found = []
    for rank in range(2):
        pool = Pool(delay=2)
        taken = Shared.left[:]
        groups = make_engine(model, pool, 5).generate(asked[rank::2], SAMPLING, pool, Shared() if rank else None)
        ids = [r.prompt.id for r in [*asked[rank::2], *reversed(taken)]][: len(groups)]
        found += [(name, facts(r)) for name, group in zip(ids, groups, strict=True) for r in group]
    assert sorted(found) == sorted(
        (r.prompt.id, f) for r, group in zip(requests(), expected, strict=True) for f in group
    )


def test_log_probs_are_those_of_transformers(model):
    sampling = replace(SAMPLING, top_p=1.0)
    exact = copy.deepcopy(model[1]).double()
    for request, group in zip(requests(), make_engine(model, Pool()).generate(requests(), sampling), strict=True):
        for rollout in group:
            ids = torch.tensor([*request.prompt.token_ids, *rollout.token_ids.tolist()])
            with torch.no_grad():
                logits = exact(ids[None]).logits[0, len(request.prompt.token_ids) - 1 : -1]
            expected = logits.log_softmax(-1).gather(-1, rollout.token_ids[:, None]).squeeze(-1)
            sampled = rollout.episode.sampled
            torch.testing.assert_close(rollout.log_probs[sampled], expected[sampled].float(), atol=1e-5, rtol=0)
            assert not rollout.log_probs[~sampled].any()
            assert rollout.spans == ((3, len(rollout.token_ids)),)


def test_the_environment_receives_every_turn_and_its_counts_are_summed(model):
    pool = Pool()
    for group in make_engine(model, pool, max_turns=3).generate(requests(2), SAMPLING):
        for rollout in group:
            episode = rollout.episode
            tokens = zip(rollout.token_ids.tolist(), episode.sampled.tolist(), strict=True)
            parts = [[t for t, _ in part] for sampled, part in groupby(tokens, lambda x: x[1]) if sampled]
            turns = [text_of(part[:-1] if part[-1] in STOPS else part) for part in parts]
            assert len(turns) == episode.turns <= 3
            sums = [sum(map(int, text.split())) for text in turns]
            no_room = episode.score.status == "no_answer"
            last = not no_room and (episode.turns == 3 or rollout.finish == "length")
            assert {(text, False) for text in turns[:-1]} | {(turns[-1], last)} <= set(pool.steps)
            assert episode.calls == 2 * len(turns) - (not no_room)
            assert episode.malformed == sum(s % 2 for s in (sums if no_room else sums[:-1]))
            assert episode.score.reward == (0 if no_room else sums[-1] / 7)
            assert sums[-1] % 5 == 0 or last or no_room


def test_a_stop_string_of_an_earlier_turn_does_not_end_a_turn(model):
    letters = lambda ids: "".join(chr(97 + int(i) % 3) for i in ids)  # noqa: E731  token t is a letter

    class Letters(Pool):
        def step(self, episode, text, last, reply):
            self.steps.append((text, last))
            reply(Reply((), True, ScoreResult(1.0, "ok")) if last else Reply(({"role": "user", "content": "3 98"},)))

    pool = Letters()
    engine = make_engine(model, pool, decode=letters, max_turns=5)
    engine.generate(requests(20), replace(SAMPLING, stop_ids=(), stop_strings=("ab",)))
    texts = [text for text, last in pool.steps if not last]
    assert len(texts) > 50
    assert all(text.index("ab") == len(text) - 2 for text in texts)


def test_a_lost_environment_and_a_first_observation_without_room_lose_the_rollout(model, capsys):
    pool = Pool(lose=lambda number, text: "environment lost: no answer in 1 s" if number % 3 == 0 else "")
    whole = [[facts(r) for r in group] for group in make_engine(model, Pool()).generate(requests(), SAMPLING)]
    found = make_engine(model, pool).generate(requests(), SAMPLING, pool)
    lost = [r for group in found for r in group if r.finish == "cut"]
    assert len(lost) == 8
    assert {r.episode.score.reason for r in lost} == {"environment lost: no answer in 1 s"}
    for got, expected in zip(found, whole, strict=True):
        assert [facts(r) for r in got if r.finish != "cut"] == [
            f for f, r in zip(expected, got, strict=True) if r.finish != "cut"
        ]
    assert "e:E: 8 rollouts are lost, for example: environment lost: no answer in 1 s" in capsys.readouterr().err

    short = make_engine(model, Pool()).generate([replace(requests()[1], n=2)], replace(SAMPLING, max_tokens=3))
    assert [(r.finish, len(r.token_ids)) for r in short[0]] == [("cut", 0)] * 2


def test_a_call_that_is_cancelled_while_environments_work_ends_them(model):
    class Silent(Pool):
        def step(self, episode, text, last, reply):
            self.steps.append((episode, last))

        def cancelled(self):
            return len(self.steps) == 24  # every rollout waits for its environment

    pool = Silent()
    found = make_engine(model, pool).generate(requests(), SAMPLING, pool)
    assert [r.finish for group in found for r in group] == ["cut"] * 24
    assert all(r.episode.turns == 1 and r.episode.score is None for group in found for r in group)
    assert sorted(pool.ended) == sorted(episode for episode, _ in pool.steps)


def test_prompts_of_another_verifier_are_sampled_in_one_turn(model):
    probes = [replace(r, prompt=replace(r.prompt, verifier="exact")) for r in requests()]
    pool = Pool()
    engine = make_engine(model, pool)
    found = engine.generate(probes, SAMPLING, pool)
    alone = engine.engine.generate(probes, SAMPLING)
    assert [[r.token_ids.tolist() for r in group] for group in found] == [
        [r.token_ids.tolist() for r in group] for group in alone
    ]
    assert not pool.steps
