"""Rows that are handed on: each ends once, wherever it goes and whatever is lost, with the tokens of its own stream."""

from __future__ import annotations

import random
from itertools import product

import fakes
import pytest
import torch
import torch.distributed as dist

from megatron_brorl.rollout.continuation import siblings
from megatron_brorl.rollout.engine import Held, Sampling
from megatron_brorl.rollout.handing import MOST_HANDS, HandedRow, Handing
from megatron_brorl.rollout.pulling import Pulled, Waiting
from megatron_brorl.rollout.records import decoded
from megatron_brorl.rollout.sampler import deal, open_groups, requests
from megatron_brorl.rollout.watchdog import Watchdog
from megatron_brorl.types import Rollout

TOKENS, ROWS = 40, 8  # of a response at most; in flight
SAMPLING = Sampling(1.0, 1.0, 0, TOKENS, (fakes.STOP,))
GROUPS = open_groups(fakes.prompts(4), 0)
SLOTS = list(product(range(4), range(16)))


class Damaging:
    """A store some of whose records arrive damaged; counts the tokens that these held."""

    def __init__(self, store, rng):
        self.store, self.rng, self.tokens = store, rng, 0

    def __getattr__(self, name):
        return getattr(self.store, name)

    def queue_push(self, key, value):
        if self.rng.random() < 0.3:
            self.tokens += len(decoded(value[16:], 0).token_ids)
            value = value[:-1] + bytes([value[-1] ^ 1])
        self.store.queue_push(key, value)


class Rank:
    """An engine that draws a token of every row a turn."""

    def __init__(self, rank, parts, store, clock, refuses=0.0, rng=None):
        self.rng, self.refuses, self.rows, self.ended = rng, refuses, {}, []
        self.drawn = self.chosen = 0
        self.numbers = []

        def asked(slots, begun):
            made, of = requests(slots, GROUPS, begun, 3)
            self.numbers += of
            return made

        waiting = Waiting(store, "call", parts, rank)
        handing = Handing(store, "call", len(SLOTS), len(parts), TOKENS, 2.0, clock)
        self.supply = Pulled(waiting, handing, asked, [], self.numbers, len(SLOTS), 9)

    def turn(self):
        chosen = self.supply.excess(len(self.rows), self.held)
        self.chosen += len(chosen)
        if chosen:
            gone = [(row.request, row.sibling) for row in chosen if not self.rng or self.rng.random() >= self.refuses]
            self.supply.give([(place[0], self.rows.pop(place)) for place in gone])

        first = len(self.supply.requests)
        for number, request in enumerate(self.supply.take(ROWS - len(self.rows), len(self.rows)), start=first):
            self.rows.update({(number, row.index): row for row in siblings(request)})

        for place, row in list(self.rows.items()):
            self.rows[place] = self.extended(place[0], row)
            self.drawn += 1
            if self.rows[place].finish != "cut":
                self.ended.append(((self.numbers[place[0]], row.index), self.rows.pop(place)))

    def extended(self, number, row):
        (ids,) = fakes.draws(self.supply.requests[number].key, [row.index], len(row.token_ids) + 1)
        finish = "stop" if ids[-1] == fakes.STOP else "length" if len(ids) == TOKENS else "cut"
        return Rollout(row.index, torch.tensor(ids), torch.zeros(len(ids)), finish, ((1, len(ids)),))

    def held(self):
        asked = self.supply.requests
        return [Held(i, s, len(row.token_ids), asked[i].hands) for (i, s), row in self.rows.items()]


def by_hand():
    """The tokens of every slot, and how many there are in all."""
    (asked, _) = requests(SLOTS, GROUPS, {}, 3)
    found = {}
    for group, request in enumerate(asked):
        for sibling, ids in enumerate(fakes.draws(request.key, range(16), TOKENS)):
            found[group, sibling] = ids[: ids.index(fakes.STOP) + 1] if fakes.STOP in ids else ids
    return found


@pytest.mark.parametrize("faults", ["none", "refusals", "damaged"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ranks", [2, 5])
def test_every_row_ends_once_with_its_tokens(ranks, seed, faults):
    """Ranks of any speed; one that hands some of what it is asked for; records that arrive damaged."""
    rng, store = random.Random(seed), dist.HashStore()
    shared = Damaging(store, rng) if faults == "damaged" else store
    now = [0.0]
    parts, refuses = deal(SLOTS, [0] * ranks), 0.5 if faults == "refusals" else 0.0
    engines = [Rank(rank, parts, shared, lambda: now[0], refuses, rng) for rank in range(ranks)]
    speeds = [0.1, *(rng.choice([0.5, 1.0]) for _ in range(ranks - 1))]
    turns = 0
    while not all(not e.rows and e.supply.over() for e in engines):
        now[0] += 1.0
        for engine, speed in zip(engines, speeds, strict=True):
            if rng.random() < speed:
                engine.turn()
        turns += 1
        assert turns < 5000

    expected = by_hand()
    ended = [pair for e in engines for pair in e.ended]
    assert sorted(slot for slot, _ in ended) == SLOTS
    assert {slot: row.token_ids.tolist() for slot, row in ended} == expected
    assert store.queue_len("handing/call/rows") == 0

    # The slow one's went to others; none was thrown about for ever, and none is counted that was kept.
    handed = sum(e.supply.handing.handed_on for e in engines)
    assert engines[0].chosen > 0
    assert handed == sum(e.chosen for e in engines) or faults == "refusals"
    taken = [r for e in engines for r in e.supply.requests if r.hands]
    assert len(taken) == handed
    assert max(r.hands for r in taken) <= MOST_HANDS
    again = sum(e.supply.handing.tokens_again for e in engines)
    assert again == sum(len(b.token_ids) for r in taken for b in r.begun)
    lost = sum(e.drawn for e in engines) - sum(map(len, expected.values()))
    assert lost == (shared.tokens if faults == "damaged" else 0)  # those are drawn once more, and no other


def handing(store, world=2, total=40, clock=lambda: 0.0):
    return Handing(store, "call", total, world, TOKENS, 1.0, clock)


def rows(count, **changed):
    return [Held(i, i, **{"tokens": 3 * i, "hands": 0, **changed}) for i in range(count)]


def test_who_has_more_than_the_mean_gives_what_is_asked_for():
    """40 rows on two ranks, of which one has 30 left: the mean is 16, so that 14 are too many."""
    store = dist.HashStore()
    one, other = handing(store), handing(store)
    assert one.excess(30, 4, lambda: rows(30)) == []  # nobody asks
    assert other.take(100, 16, 1) == []  # it has nearly as many as the mean of 35 / 2
    assert one.excess(30, 4, lambda: rows(30)) == []
    late = handing(store, clock=lambda: 1.0)  # who has looked may look again after an interval
    late._reported, other._look_at = 4, 0.0
    assert other.take(5, 2, 4) == []  # there is nothing yet
    chosen = late.excess(30, 4, lambda: rows(30))
    assert [row.tokens for row in chosen] == [0, 3, 6, 9, 12]  # five it has room for; first what costs least
    tokens = [(row.sibling, torch.arange(row.tokens), torch.zeros(row.tokens)) for row in chosen]
    given = [HandedRow((1, made[0]), Rollout(*made, "cut", ((0, len(made[1])),)), 2, 1) for made in tokens]
    late.give(given[:4])  # one has ended
    assert store.add("handing/call/wanted", 0) == 1
    other._look_at = 0.0
    got = other.take(5, 2, 4)
    assert [(row.slot, row.drawn, row.hands, row.rollout.token_ids.tolist()) for row in got] == [
        ((1, i), 2, 1, list(range(3 * i))) for i in range(4)
    ]
    assert (late.handed_on, other.tokens_again) == (4, 3 + 6 + 9)


@pytest.mark.parametrize(
    ("changed", "found"),
    [({}, 8), ({"hands": MOST_HANDS}, 0), ({"tokens": TOKENS - 2}, 0), ({"tokens": TOKENS - 2, "waits": True}, 8)],
)
def test_only_rows_that_are_worth_it_are_handed_on(changed, found):
    """Neither one that was handed on too often, nor one that is about to end, unless it waits."""
    store = dist.HashStore()
    store.add("handing/call/wanted", 8)
    assert len(handing(store, total=20).excess(20, 0, lambda: rows(8, **changed))) == found
    assert store.add("handing/call/wanted", 0) == 8 - found


def test_two_that_promise_the_same_row_give_it_once():
    """What is asked for falls below zero between the two; who was late keeps its own."""
    store = dist.HashStore()

    class Late:
        def __getattr__(self, name):
            return getattr(store, name)

        def add(self, key, amount):
            if key.endswith("wanted") and amount < 0:
                store.add(key, -3)  # another one's promise
            return store.add(key, amount)

    store.add("handing/call/wanted", 4)
    assert len(handing(Late(), total=20).excess(20, 0, lambda: rows(8))) == 1
    assert store.add("handing/call/wanted", 0) == 0


def test_what_nobody_has_taken_comes_back_with_a_call_that_is_told_to_stop(capfd):
    """A rank hands on all it has and nobody takes it: its rows are returned as they are, and none counts as late."""
    parts = deal(SLOTS, [0, 0])
    store = dist.HashStore()
    rank = Rank(0, parts, store, lambda: 0.0)

    class Giving(fakes.Engine):
        def generate(self, requests, sampling, watch=None, supply=None):
            asked = supply.take(4, 0)
            store.add("handing/call/wanted", 4)
            nothing = Rollout(asked[0].first, torch.arange(3), torch.zeros(3), "cut", ((0, 3),))
            held = [Held(0, nothing.index, 3, 0)] + [Held(0, asked[0].first + i, 0, 0) for i in (1, 2, 3)]
            rank.supply.handing._total = 4
            (first, *_) = supply.excess(4, lambda: held)
            assert first.sibling == nothing.index or first.tokens == 0
            supply.give([(0, nothing)])
            while not watch.cancelled():
                assert supply.wait() or watch.cancelled()
            return [[]]

    result = Watchdog(Giving(), 0.2).generate([], SAMPLING, supply=rank.supply)
    assert [r.n for r in result.requests] == [4, 1]
    assert result.late == 3  # not the one that was handed on
    ((back,),) = result.rollouts[1:]
    assert (back.index, back.token_ids.tolist(), back.finish) == (result.requests[0].first, [0, 1, 2], "cut")
    assert "3 of 4 rollouts have not ended" in capfd.readouterr().err
