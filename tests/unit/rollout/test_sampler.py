"""Distribution of rollouts over ranks: each once, evenly, in requests of consecutive rollouts; work stealing."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import product

import fakes
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load, save

from megatron_brorl.ops.philox import stream_key
from megatron_brorl.rollout.engine import Request, Sampling, rollouts_from_tensors, rollouts_to_tensors, sort_rollouts
from megatron_brorl.rollout.sampler import (
    MIN_NATS,
    SharedSlots,
    SlotSupply,
    WorkStealing,
    deal,
    improbable_rollouts,
    make_groups,
    requests,
)
from megatron_brorl.rollout.watchdog import Watchdog
from megatron_brorl.types import Episode, Prompt, PromptGroup, Rollout, ScoredRollout, ScoreResult

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=12, stop_ids=(fakes.STOP,))
GROUPS = make_groups(fakes.prompts(5), round=0)


def best_by_search(total: int, loads: list[int]) -> list[int]:
    """Return the sorted loads after giving every row to the part with the smallest load."""
    ends = list(loads)
    for _ in range(total):
        ends[ends.index(min(ends))] += 1
    return sorted(ends)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("loads", [0, 3])
def test_every_rollout_is_sampled_once(ranks, loads):
    begun = [loads * (rank % 4) for rank in range(ranks)]  # rollouts that a rank continues
    new = list(product((1, 2, 3), range(10)))
    shares = deal(new, begun)
    assert sorted(slot for share in shares for slot in share) == new
    rows = sorted(len(share) + before for share, before in zip(shares, begun, strict=True))
    assert rows == best_by_search(len(new), begun)


@pytest.mark.parametrize(("prompts", "n", "ranks"), [(5, 16, 4), (5, 16, 3), (7, 2, 5), (128, 16, 64), (3, 512, 7)])
def test_rollouts_of_each_prompt_are_split_over_all_ranks(prompts, n, ranks):
    """Every rank gets one run per prompt; run lengths and loads of two ranks differ by at most one."""
    parts = deal(list(product(range(prompts), range(n))), [0] * ranks)
    for number, part in product(range(prompts), parts):
        siblings = [sibling for group, sibling in part if group == number]
        assert not siblings or siblings == list(range(siblings[0], siblings[-1] + 1))
        assert len(siblings) in (n // ranks, -(-n // ranks))
    assert {len(part) for part in parts} <= {prompts * n // ranks, -(-prompts * n // ranks)}


def test_groups_of_unequal_size_are_split_evenly():
    sizes = [3, 0, 41, 8, 1, 1, 29]
    parts = deal([(group, s) for group, size in enumerate(sizes) for s in range(size)], [0, 5, 0, 9])
    lengths = [len(part) for part in parts]
    assert lengths == [24, 24 - 5, 24, 25 - 9]  # 83 rollouts and loads of 14 are 3 x 24 + 25 rows
    for group, size in enumerate(sizes):
        counts = [sum(g == group for g, _ in part) for part in parts]
        assert sum(counts) == size
        assert all(abs(count - size * n / 83) < 1.5 for count, n in zip(counts, lengths, strict=True))


def test_requests_are_runs_of_consecutive_rollouts():
    groups = [PromptGroup(p, round=number, index=0) for number, p in enumerate(fakes.prompts(3))]
    slots = [(0, 3), (0, 40), (0, 41), (1, 42), (1, 43), (2, 0)]
    begun = {slot: Rollout(slot[1], torch.arange(3), torch.zeros(3), "cut", ((0, 3),)) for slot in slots[:3]}
    step_requests, numbers = requests(slots, groups, begun, seed=5)
    assert numbers == [0, 0, 1, 2]
    assert [(r.first, r.n) for r in step_requests] == [(3, 1), (40, 2), (42, 2), (0, 1)]
    assert [r.prompt.id for r in step_requests] == ["p/0", "p/0", "p/1", "p/2"]
    assert [r.key for r in step_requests] == [stream_key(5, number, f"p/{number}") for number in (0, 0, 1, 2)]
    assert [[b.index for b in r.begun] for r in step_requests] == [[3], [40, 41], [], []]


def plain(row):
    """Return all fields of a row except its reward, with lists for tensors."""
    owners = [row.rollout, row.rollout.episode, row.score]
    fields = {name: value for owner in owners if owner for name, value in vars(owner).items() if name != "episode"}
    values = {name: x.tolist() if isinstance(x, torch.Tensor) else x for name, x in fields.items()}
    return row.group, row.answer, row.right, values


def test_rollouts_become_tensors_and_back_bit_for_bit():
    g = torch.Generator().manual_seed(0)
    rows = []
    for i, (length, finish, spans) in enumerate(
        [(3, "stop", ((0, 1), (4, 2))), (0, "cut", ()), (7, "length", ((2, 7),)), (1, "cut", ((9, 1),))]
    ):
        ids = torch.randint(0, 2**40, (length,), generator=g)
        reward = float("nan") if finish == "cut" else 1 / 3
        rollout = Rollout(i, ids, torch.randn(length, generator=g), finish, spans)
        rows.append(ScoredRollout(i % 2, rollout, reward, right=i == 2, answer=2**52 - i))
    score = ScoreResult(1 / 3, "ok", 'says "\u2028"', {"format": 1.0, "answer": 0.1})
    rows[0], rows[2] = (replace(row, score=score) for row in (rows[0], rows[2]))
    episodes = (Episode(torch.tensor([True, False, True]), 2, 1, 1, score), Episode(torch.zeros(0) > 0, 0), None, None)
    turns = [replace(r, rollout=replace(r.rollout, episode=e)) for r, e in zip(rows, episodes, strict=True)]
    routes = [torch.randint(0, 300, (4 + i, 3, 2), dtype=torch.int16, generator=g) for i in range(4)]
    routes[1] = None
    with_routes = [replace(row, rollout=replace(row.rollout, routes=x)) for row, x in zip(rows, routes, strict=True)]
    for sent in (rows, turns, with_routes, []):
        restored = rollouts_from_tensors(load(save(rollouts_to_tensors(sent))))
        assert list(map(plain, restored)) == list(map(plain, sent))
        rewards = [r.reward for r in sent]
        assert [r.reward for r in restored] == pytest.approx(rewards, abs=1e-7, nan_ok=True)  # float32
    assert [(r.group, r.rollout.index) for r in sort_rollouts(rows)] == [(0, 0), (0, 2), (1, 1), (1, 3)]


def test_duplicates_are_distinguished_from_likely_repeats():
    def rollout(index, ids, nats):
        return Rollout(index, torch.tensor(ids), torch.full((len(ids),), -nats / len(ids)), "length")

    batch = [Request(Prompt(str(key), "", (1,), answer=None, verifier=""), key, n=3) for key in (4, 5)]
    likely, rare = MIN_NATS - 1, MIN_NATS + 1
    first = [rollout(0, [1, 2], rare), rollout(1, [1, 2], rare), rollout(2, [1, 3], rare)]
    second = [rollout(0, [1, 2], rare), rollout(1, [9, 9], likely), rollout(2, [9, 9], likely)]
    nan = Rollout(3, torch.tensor([1, 2]), torch.full((2,), float("nan")), "length")
    hashes, names = improbable_rollouts(batch, [first, [*second, nan]])
    assert names == [f"prompt 4: sibling {i}" for i in range(3)] + ["prompt 5: sibling 0"]
    assert hashes[0] == hashes[1]
    assert len(set(hashes.tolist())) == 3  # rollouts of another prompt have other hashes
    second_group = Request(batch[0].prompt, key=6, n=3)  # a second group of the prompt has its own key
    assert improbable_rollouts([second_group], [first[:1]])[0] == hashes[0]


# Work stealing


def shared_slots(parts):
    store = dist.HashStore()
    return [SharedSlots(store, name="call", parts=parts, rank=rank) for rank in range(len(parts))]


def test_claims_start_with_the_own_part():
    a, b, c = shared_slots([[(0, i) for i in range(12)], [(1, i) for i in range(20)], [(2, i) for i in range(3)]])
    assert a.claim(10) == [(0, i) for i in range(10)]
    assert b.claim(4) == [(1, i) for i in range(4)]
    assert a.claim(3) == [(0, 10), (0, 11)]
    assert a.claim(9) == [(1, i) for i in range(4, 13)]
    assert c.claim(5) == [(2, 0), (2, 1), (2, 2)]
    assert c.claim(1) == [(1, 13)]
    assert b.claim(100) == [(1, i) for i in range(14, 20)]
    assert [slots.claim(9) for slots in (a, b, c)] == [[], [], []]


def test_a_call_deletes_the_counters_of_the_call_before():
    store = dist.HashStore()
    stealing = WorkStealing(store)
    assert WorkStealing(store).begin([[(0, 0)] * 50], rank=0) is None  # A single rank shares with no one.
    slots = stealing.begin([[(0, 0)] * 4, [(0, 0)] * 3], rank=0)
    assert len(slots.claim(2)) == 2
    assert store.num_keys() == 1
    stealing.begin([[(0, 0)]], rank=0)
    assert store.num_keys() == 0
    assert slots.claim(2) == []


def supplied(waiting, groups, seed=3):
    """Return a supply and the list that collects the groups of its requests."""
    numbers = []

    def new_requests(slots):
        batch, group_numbers = requests(slots, groups, {}, seed)
        numbers.extend(group_numbers)
        return batch

    return SlotSupply(waiting, new_requests, rows=80, prompt_tokens=9), numbers


def test_other_ranks_sample_the_rest_of_an_abandoned_engine(capfd):
    parts = deal(list(product(range(5), range(16))), [0, 0])
    waiting, release = shared_slots(parts), threading.Event()
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
    by_slot = dict(results)
    assert len(by_slot) == len(results) == 5 * 16 - 1  # only the hanging rollout is lost
    for (group, sibling), rollout in by_slot.items():
        (request,), _ = requests([(group, sibling)], GROUPS, begun={}, seed=3)
        (tokens,) = fakes.draws(request.key, [sibling], SAMPLING.max_tokens)
        assert rollout.token_ids.tolist() == tokens[: len(rollout.token_ids)]


def test_cancelled_engine_gets_no_more_requests():
    waiting = shared_slots(deal(list(product(range(5), range(16))), [0, 0]))
    supply, _ = supplied(waiting[0], GROUPS)

    class Slow(fakes.Engine):
        def generate(self, requests, sampling, callbacks=None, supply=None):
            callbacks._cancelled.wait()
            assert supply.next_requests(4) == []
            assert not supply.has_more()
            return []

    assert Watchdog(Slow(), 0.1).generate([], SAMPLING, supply=supply).requests == []
    assert [len(waiting[1].claim(100)) for _ in range(2)] == [40, 40]  # its own part, then the first rank's
