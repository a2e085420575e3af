"""Who samples what: every rollout once, evenly, in requests of consecutive siblings."""

from __future__ import annotations

from itertools import pairwise, product
from types import SimpleNamespace

import fakes
import pytest
import torch

from megatron_brorl.ops.philox import stream_key
from megatron_brorl.rollout.rows import from_tensors, in_order, to_tensors
from megatron_brorl.rollout.sampler import even_cuts, own_slots, requests
from megatron_brorl.types import OpenGroup, Rollout, ScoredRollout


def best_by_search(total: int, loads: list[int]) -> list[int]:
    """Final loads, sorted, of giving every row to whoever has least."""
    ends = list(loads)
    for _ in range(total):
        ends[ends.index(min(ends))] += 1
    return sorted(ends)


def test_cuts_are_as_even_as_can_be():
    for parts in (1, 2, 3, 4):
        for loads in product((0, 1, 2, 5, 9), repeat=parts):
            for total in (0, 1, 2, 7, 40):
                cuts = even_cuts(total, list(loads))
                assert cuts[0] == 0
                assert cuts[-1] == total
                shares = [b - a for a, b in pairwise(cuts)]
                assert min(shares) >= 0
                assert sorted(s + x for s, x in zip(shares, loads, strict=True)) == best_by_search(total, list(loads))


def grids(data: int, model: int):
    """A stand-in for the grid of every rank."""
    for dp, mp in product(range(data), range(model)):
        yield SimpleNamespace(data=data, dp_rank=dp, mp_size=model, mp_rank=mp)


@pytest.mark.parametrize(("data", "model"), [(1, 1), (2, 1), (1, 2), (3, 2), (5, 4)])
@pytest.mark.parametrize("loads", [0, 3])
def test_every_rollout_is_sampled_once(data, model, loads):
    begun = [[(0, 7 * dp + i) for i in range(loads * dp)] for dp in range(data)]
    shares = [
        own_slots(begun[g.dp_rank], list(product((1, 2, 3), range(10))), [len(b) for b in begun], g)
        for g in grids(data, model)
    ]
    asked = [slot for share in shares for slot in share]
    assert sorted(asked) == sorted([*(s for b in begun for s in b), *product((1, 2, 3), range(10))])
    sizes = [len(s) for s in shares]
    assert max(sizes) - min(sizes) <= 2  # one among replicas, one among the ranks of a replica
    for g, share in zip(grids(data, model), shares, strict=True):  # what was begun goes on where it was
        assert {s for s in share if s[0] == 0} <= set(begun[g.dp_rank])


def test_requests_are_runs_of_siblings():
    groups = [OpenGroup(p, step, 0) for step, p in enumerate(fakes.prompts(3))]
    slots = [(0, 3), (0, 40), (0, 41), (1, 42), (1, 43), (2, 0)]
    begun = {slot: Rollout(slot[1], torch.arange(3), torch.zeros(3), "cut", ((0, 3),)) for slot in slots[:3]}
    asked, numbers = requests(slots, groups, begun, seed=5)
    assert numbers == [0, 0, 1, 2]
    assert [(r.first, r.n) for r in asked] == [(3, 1), (40, 2), (42, 2), (0, 1)]
    assert [r.prompt.id for r in asked] == ["p/0", "p/0", "p/1", "p/2"]
    assert [r.key for r in asked] == [stream_key(5, step, f"p/{step}") for step in (0, 0, 1, 2)]
    assert [[b.index for b in r.begun] for r in asked] == [[3], [40, 41], [], []]


def test_rows_travel_bit_for_bit():
    g = torch.Generator().manual_seed(0)
    rows = []
    for i, (length, finish, spans) in enumerate(
        [(3, "stop", ((0, 1), (4, 2))), (0, "cut", ()), (7, "length", ((2, 7),)), (1, "cut", ((9, 1),))]
    ):
        ids = torch.randint(0, 2**40, (length,), generator=g)
        reward = float("nan") if finish == "cut" else 1 / 3
        rows.append(
            ScoredRollout(i % 2, Rollout(i, ids, torch.randn(length, generator=g), finish, spans), reward, 2**52 - i)
        )
    for sent in (rows, []):
        back = from_tensors(to_tensors(sent))
        for a, b in zip(sent, back, strict=True):
            assert (a.group, a.rollout.index, a.rollout.finish, a.rollout.spans) == (
                b.group,
                b.rollout.index,
                b.rollout.finish,
                b.rollout.spans,
            )
            assert a.answer == b.answer
            assert torch.equal(a.rollout.token_ids, b.rollout.token_ids)
            assert torch.equal(a.rollout.log_probs, b.rollout.log_probs)
            assert b.reward == pytest.approx(a.reward, abs=1e-7, nan_ok=True)  # a float32
    assert [(r.group, r.rollout.index) for r in in_order(rows)] == [(0, 0), (0, 2), (1, 1), (1, 3)]
