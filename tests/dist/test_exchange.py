"""Exchange of rows on 2 and 4 ranks: bit-exact, at equal cost, and without unnecessary bytes."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch
from dist.exchange_jobs import CUT, LOST, PROMPTS, N, rollout

from megatron_brorl.config.schema import AlgoConfig
from megatron_brorl.parallel.balance import CostModel

LAYOUTS = [(2, {}), (2, {"tensor": 2}), (4, {}), (4, {"tensor": 2}), (4, {"pipeline": 2})]
KEPT = [0, 1, 2, 5]  # all of group 3 are right, and one of group 4 continues in the next step
PAIR = 1e-3


def cost(rows: list[tuple[int, int]]) -> float:
    """Return the cost of a row with its own prompt: its tokens, and PAIR for each pair of tokens."""
    lengths = [PROMPTS[g] + len(rollout(g, s).rollout.token_ids) for g, s in rows]
    return sum(n + PAIR * sum(range(n)) for n in lengths)


@pytest.mark.parametrize(("size", "parallel"), LAYOUTS)
@pytest.mark.parametrize(("of", "overlong", "message"), [("prompts", False, 2**28), ("siblings", True, 80_000)])
def test_rows_reach_their_replicas(worlds, size, parallel, of, overlong, message):
    with_routes = overlong
    algo = AlgoConfig(mini_batches=3, mini_batch_of=of, overlong_filter=overlong)
    costs = CostModel(PAIR, 4096, False)
    found = worlds(size).run("exchange_jobs:exchanged", parallel, algo, costs, message, with_routes)
    model = prod(parallel.values())
    replicas = {f["replica"]: f["rows"] for f in found}
    assert sorted(replicas) == list(range(size // model))

    # All ranks of a replica have the same rows; every trained row is on one replica, unchanged.
    places = {}
    for f in found:
        for a, b in zip(f["rows"], replicas[f["replica"]], strict=True):
            assert (a.group, a.index) == (b.group, b.index)
        for row in f["rows"]:
            sent = rollout(row.group, row.index)
            assert torch.equal(row.token_ids, sent.rollout.token_ids)
            assert torch.equal(row.log_probs, sent.rollout.log_probs.view(torch.int32))
            masks = [row.sampled, getattr(sent.rollout.episode, "sampled", None)]
            assert masks == [None, None] or torch.equal(*masks)
            assert row.right == sent.right
            if with_routes:
                assert torch.equal(row.routes, sent.rollout.routes)
            else:
                assert row.routes is None
            places[row.group, row.index] = f["replica"]
    expected = {slot for slot in product(KEPT, range(N)) if slot not in LOST | CUT}
    if overlong:
        expected = {slot for slot in expected if rollout(*slot).rollout.finish == "stop"}
    assert places.keys() == expected
    assert sum(map(len, replicas.values())) == len(expected)

    # In every optimizer step all replicas have equal costs.
    mean = 0.0
    most = 0.0
    for step in range(3):
        parts = [
            [
                (g, s)
                for (g, s), at in places.items()
                if at == i and (KEPT.index(g) if of == "prompts" else s) % 3 == step
            ]
            for i in replicas
        ]
        costs = [cost(part) for part in parts]
        assert min(costs) > 0
        assert max(costs) <= 1.02 * sum(costs) / len(costs)
        mean = mean + sum(costs) / len(costs)
        most = most + max(costs)
    assert all(f["balance"] == pytest.approx(mean / most, abs=1e-3) for f in found)

    # A row is sent once to every rank of its replica that did not sample it, 4 bytes per id and per log-probability,
    # and 2 for each of the 3 experts of a token.
    holders = {slot: f["replica"] for f in found for slot in f["held"]}
    needed = sum(
        (8 * len(r.token_ids) + 6 * with_routes * len(r.routes)) * (model - (holders[slot] == at))
        for (slot, at), r in ((place, rollout(*place[0]).rollout) for place in places.items())
    )
    assert {f["moved"] for f in found} == {needed}
    assert sum(f["sent"] for f in found) == needed
    assert all(f["messages"] > (2 if message < 2**28 else 0) for f in found)


def test_exchange_without_rows_to_train_on(worlds):
    """If every rollout is lost, all ranks agree that there are no messages."""
    algo = AlgoConfig(mini_batches=2)
    for f in worlds(2).run("exchange_jobs:nothing", {}, algo, CostModel(PAIR, 4096, True)):
        assert f == ([], 0, 1.0)
