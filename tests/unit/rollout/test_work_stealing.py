"""Tests that every slot is claimed once, and that its tokens do not depend on the rank."""

from __future__ import annotations

import random
import threading
from itertools import product

import fakes
import pytest
import torch.distributed as dist

from megatron_brorl.rollout.engine import Sampling
from megatron_brorl.rollout.sampler import SharedSlots, SlotSupply, WorkStealing, deal, make_groups, requests
from megatron_brorl.rollout.watchdog import Watchdog

SAMPLING = Sampling(1.0, 1.0, 0, 12, (fakes.STOP,))
GROUPS = make_groups(fakes.prompts(5), 0)


def shares(parts, store=None):
    store = store or dist.HashStore()
    return [SharedSlots(store, "call", parts, rank) for rank in range(len(parts))]


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("seed", range(4))
def test_every_slot_is_claimed_once(ranks, seed):
    rng, new = random.Random(seed), list(product(range(5), range(16)))
    parts = deal(new, [rng.randrange(20) for _ in range(ranks)])
    waiting, taken = shares(parts), [[] for _ in range(ranks)]
    asking = list(range(ranks))
    while asking:
        rank = rng.choice(asking)
        found = waiting[rank].claim(rng.randrange(1, 12))
        if not found:
            asking.remove(rank)
        taken[rank].append(found)
    assert sorted(slot for claims in taken for claim in claims for slot in claim) == new
    for claims in taken:
        for claim in claims:
            assert any(claim == part[i : i + len(claim)] for part in parts for i in range(len(part) + 1))


def test_claims_start_with_the_own_part():
    a, b, c = shares([[(0, i) for i in range(12)], [(1, i) for i in range(20)], [(2, i) for i in range(3)]])
    assert a.claim(10) == [(0, i) for i in range(10)]
    assert b.claim(4) == [(1, i) for i in range(4)]
    assert a.claim(3) == [(0, 10), (0, 11)]
    assert a.claim(9) == [(1, i) for i in range(4, 13)]
    assert c.claim(5) == [(2, 0), (2, 1), (2, 2)]
    assert c.claim(1) == [(1, 13)]
    assert b.claim(100) == [(1, i) for i in range(14, 20)]
    assert [w.claim(9) for w in (a, b, c)] == [[], [], []]


def test_a_call_deletes_the_counters_of_the_call_before():
    store = dist.HashStore()
    stealing = WorkStealing(store)
    assert WorkStealing(store).begin([[(0, 0)] * 50], 0) is None  # A single rank shares with no one.
    slots = stealing.begin([[(0, 0)] * 4, [(0, 0)] * 3], 0)
    assert len(slots.claim(2)) == 2
    assert store.num_keys() == 1
    stealing.begin([[(0, 0)]], 0)
    assert store.num_keys() == 0
    assert slots.claim(2) == []


def supplied(waiting, groups, seed=3):
    """Return a supply and the list that collects the groups of its requests."""
    numbers = []

    def asked(slots):
        made, of = requests(slots, groups, {}, seed)
        numbers.extend(of)
        return made

    return SlotSupply(waiting, asked, 80, 9), numbers


def test_other_ranks_sample_the_rest_of_an_abandoned_engine(capfd):
    parts = deal(list(product(range(5), range(16))), [0, 0])
    waiting, release = shares(parts), threading.Event()
    stuck = fakes.Engine(stall={("p/0", 0)}, deaf=release, takes=2, room=4)
    results = []
    for rank, engine in enumerate((stuck, fakes.Engine(room=4))):
        supply, numbers = supplied(waiting[rank], GROUPS)
        dog = Watchdog(engine, 0.4, rank, grace_s=0.2) if rank == 0 else Watchdog(engine, 60.0, rank)
        result = dog.generate([], SAMPLING, supply=supply)
        results += [
            ((group, r.index), r) for group, rollouts in zip(numbers, result.rollouts, strict=True) for r in rollouts
        ]
        assert dog.stuck == (rank == 0)
    release.set()
    assert "1 of prompt p/0" in capfd.readouterr().err
    found = dict(results)
    assert len(found) == len(results) == 5 * 16 - 1  # only the hanging rollout is lost
    for (group, sibling), rollout in found.items():
        (request,), _ = requests([(group, sibling)], GROUPS, {}, 3)
        (drawn,) = fakes.draws(request.key, [sibling], 12)
        assert rollout.token_ids.tolist() == drawn[: len(rollout.token_ids)]


def test_cancelled_engine_gets_no_more_requests():
    waiting = shares(deal(list(product(range(5), range(16))), [0, 0]))
    supply, _ = supplied(waiting[0], GROUPS)

    class Slow(fakes.Engine):
        def generate(self, requests, sampling, callbacks=None, supply=None):
            callbacks._cancelled.wait()
            assert supply.next_requests(4) == []
            assert not supply.has_more()
            return []

    assert Watchdog(Slow(), 0.1).generate([], SAMPLING, supply=supply).requests == []
    assert len(waiting[1].claim(100)) == len(waiting[1].claim(100)) == 40  # its own part, then the first rank's
