"""The simulation's own arithmetic by hand, and what it must show."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import generation_clock as clock
import simulate_balance as simulation

from megatron_brorl.config.schema import AlgoConfig
from megatron_brorl.parallel.balance import CostModel


def test_efficiency():
    assert simulation.efficiency(np.array([1, 2, 3])) == pytest.approx(2 / 3)
    assert simulation.efficiency(np.array([[1, 3], [2, 2]])) == pytest.approx(4 / 5)


def test_lengths_and_kept_groups():
    outcomes = simulation.drawn(512, seed=1)
    assert len(outcomes.kept) == 79  # 62% of 128
    assert outcomes.tokens.max() == simulation.LONGEST
    logs = outcomes.tokens.double().log()
    uncut = logs[outcomes.tokens.double().median(1).values < 4000]
    assert float(uncut.std(1).mean()) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("of", ["prompts", "siblings"])
def test_what_runs_cost_by_hand(of):
    """Rows that differ in nothing: a replica of 64 has two prompts, of which only some are in an optimizer step."""
    outcomes = simulation.drawn(16, seed=2)
    outcomes.tokens.fill_(1000)
    holder = simulation.in_runs(outcomes, 64)
    assert holder[6].tolist() == [3] * 16
    steps = [Counter() for _ in range(8)]
    for place, group in enumerate(outcomes.kept):
        for sibling in range(16):
            steps[(place if of == "prompts" else sibling) % 8][group // 2] += 1
    expected = sum(step.total() / 64 for step in steps) / sum(max(step.values()) for step in steps)
    algo = AlgoConfig(mini_batches=8, mini_batch_of=of)
    got = simulation.old_update(outcomes, holder, algo, CostModel(1e-4, 10**6, False), 64)
    assert got == pytest.approx(expected)


def test_the_quick_table(monkeypatch, tmp_path):
    out = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["simulate_balance.py", "--quick", "--json", str(out)])
    simulation.main()
    table = json.loads(out.read_text())
    for row in table[:2]:
        assert row["rows"] == 79 * 64
        assert row["update"] >= 0.98 > 0.9 > row["update_runs"]
        assert row["generation"] >= 0.95 > row["generation_runs"]
    assert len(table) == 2 + 6 + 3
    for row in table[2:]:
        assert row["in_flight"] > 32 or row["pulled"] > row["dealt"]
        assert row["pulled, least"] == row["pulled"]  # of one seed


def seconds_by_hand(lengths, in_flight, fixed):
    """One engine, token by token: rows enter in order as others end."""
    waiting, left, now = list(lengths), [], 0.0
    while waiting or left:
        while waiting and len(left) < in_flight:
            left.append(waiting.pop(0))
        now += fixed + len(left)
        left = [tokens - 1 for tokens in left if tokens > 1]
    return now


@pytest.mark.parametrize("how", ["dealt", "pulled"])
@pytest.mark.parametrize(("in_flight", "fixed"), [(1, 0.0), (5, 3.0), (100, 2.0)])
def test_the_clock_of_one_engine(how, in_flight, fixed):
    lengths = np.random.default_rng(0).integers(1, 60, (3, 16))
    slots = list(np.ndindex(3, 16))
    ((busy,), end) = clock.Step(lengths, [slots], in_flight, clock.Clock(fixed), how).run()
    assert busy == end == pytest.approx(seconds_by_hand(lengths.flatten(), in_flight, fixed))


@pytest.mark.parametrize("in_flight", [16, 32, 64])
def test_engines_of_unlike_speed_share_what_waits(in_flight):
    """512 rows each on eight engines, one of which is half as fast and one twice as fast."""
    lengths = simulation.drawn(32, seed=3).tokens.numpy()
    parts = simulation.deal(list(np.ndindex(128, 32)), [0] * 8)
    speeds = clock.Clock(simulation.WEIGHTS, simulation.SPEEDS)
    found = {}
    for how in ("dealt", "pulled"):
        step = clock.Step(lengths, parts, in_flight, speeds, how)
        busy, end = step.run()
        found[how] = busy.mean() / end, end
        assert sorted(slot for part in step.sampled for slot in part) == list(np.ndindex(128, 32))
    assert found["pulled"][0] > 0.65 > found["dealt"][0]
    assert found["pulled"][1] < 0.7 * found["dealt"][1]
