"""Whole steps on 1, 2 and 4 ranks: siblings span ranks, rollouts are lost or carried, and the result is the same."""

from __future__ import annotations

from itertools import product

import fakes
import pytest
import torch
from by_hand import responses, right
from dist.steps import VARIANTS, assert_same
from dist.world import CP, PP, TP, World

from megatron_brorl.algo.pass_at_k import pass_at_k
from megatron_brorl.rollout_log import entries, read_groups, read_rollouts

pytestmark = pytest.mark.slow
LOST = {("p/0", 5), ("p/1", 15), ("p/1", 16), ("p/2", 31), ("p/4", 0)}
STEPS = {"partial": 5, "critic": 3}  # of the other variants: 2


@pytest.fixture(scope="module")
def single(worlds, directory):
    """Return a function that runs a variant in a single process once."""
    results = {}

    def get(variant, lose):
        key = (variant, frozenset(lose))
        if key not in results:
            arguments = (directory, {}, VARIANTS[variant], STEPS.get(variant, 2), {"lose": lose})
            (results[key],) = worlds(1).run("steps:run_steps", *arguments)
        return results[key]

    return get


@pytest.mark.parametrize(
    ("size", "parallel", "variant"),
    [
        *((2, {}, variant) for variant in VARIANTS),
        (2, TP, "critic"),
        (2, PP, "prompts"),
        (4, {}, "siblings"),
        (4, TP, "partial"),
        (4, PP, "reward_kl"),
        (4, CP, "critic"),
    ],
)
def test_steps_equal_those_of_one_process(worlds, directory, single, size, parallel, variant):
    steps = STEPS.get(variant, 2)
    results = worlds(size).run("steps:run_steps", directory, parallel, VARIANTS[variant], steps, {"lose": LOST})
    expected = single(variant, LOST)
    assert_same(results, expected)
    assert expected[0][0]["lost_share"] == 4 / 96  # of LOST, p/4 belongs to the second step
    key = "theory_exact/unsampled_mass"
    masses = [metrics[key] for metrics in expected[0] if key in metrics]
    assert masses  # A step without a complete group has none.
    assert all(0 < mass < 1 for mass in masses)
    assert sum(metrics["updates"] for metrics in expected[0]) >= steps - 1
    requested = [slot for result in results for slot in slots_of(result)]
    assert len(requested) == len(set(requested))
    first_step = {(prompt, sibling) for step, prompt, sibling in requested if step == 0}
    assert first_step == set(product(("p/0", "p/1", "p/2"), range(32)))
    rows_of_rank = [sum(len(siblings) for step, _, siblings in calls if step == 0) for _, _, calls in results]
    assert rows_of_rank == [3 * 32 // size] * size
    # The siblings of a prompt are on several ranks.
    prompts_of_rank = [{prompt for _, prompt, _ in calls} for _, _, calls in results]
    assert any(sum(prompt in prompts for prompts in prompts_of_rank) > 1 for prompt, _ in first_step)


@pytest.mark.parametrize(("size", "parallel"), [(2, PP), (4, TP)])
def test_a_rank_that_loses_all_rollouts_blocks_no_other_rank(worlds, directory, size, parallel):
    """The rank loses the last siblings of the first step; all ranks train on the survivors of the others."""
    changes = VARIANTS["prompts"]
    lost = {(f"p/{i}", s) for i, s in product(range(3), range(32 - 32 // size, 32))}
    faults = {"rank": size - 1, "lose": {(f"p/{i}", s) for i, s in product(range(3), range(32))}}
    results = worlds(size).run("steps:run_steps", directory, parallel, changes, steps=2, faults=faults)
    (expected,) = worlds(1).run("steps:run_steps", directory, {}, changes, steps=2, faults={"lose": lost})
    assert_same(results, expected)
    assert results[0][0][0]["lost_share"] == len(lost) / 96
    assert results[0][0][0]["groups_lost"] == 0


def slots_of(result):
    return [(step, prompt, sibling) for step, prompt, siblings in result[2] for sibling in siblings]


@pytest.mark.parametrize(("size", "variant", "slow_rank"), [(2, "partial", 1), (4, "prompts", 2)])
def test_work_stealing_changes_no_result(worlds, directory, single, size, variant, slow_rank):
    """slow_rank takes rows only once; the others sample the rest of its share, four rows at a time."""
    steps = STEPS.get(variant, 2)
    changes = VARIANTS[variant]
    changes = {**changes, "rollout": {**changes["rollout"], "max_num_seqs": 4, "pull": True}}
    faults = {"rank": slow_rank, "takes": 1}
    results = worlds(size).run("steps:run_steps", directory, {}, changes, steps, faults)
    expected = single(variant, set())
    assert_same(results, expected)
    *by_rank, expected_slots = map(slots_of, (*results, expected))
    assert sorted(slot for slots in by_rank for slot in slots) == sorted(expected_slots)
    # In a step the slow rank has at most four rows, and with partial rollouts also the ones that it had begun.
    for step in range(steps if variant != "partial" else 1):
        assert sum(slot[0] == step for slot in by_rank[slow_rank]) <= 4
    assert len(by_rank[slow_rank]) < min(len(slots) for rank, slots in enumerate(by_rank) if rank != slow_rank)


def test_partial_rollouts_are_carried(single):
    """Compare with the random streams: n tokens that begin in step s continue in step t > s if n > 4 (t - s)."""
    metrics, _, calls = single("partial", LOST)
    groups = [
        (step, prompt.id, responses(seed=3, prompt=prompt, n=32, tokens=12, stream=step))
        for step in range(5)
        for prompt in fakes.prompts(3, first=3 * step)
    ]
    lengths = {  # tokens by first step, prompt and sibling
        (step, name, i): len(row) for step, name, rows in groups for i, row in enumerate(rows) if (name, i) not in LOST
    }
    for now in range(5):
        open_before = {(s, name) for s, name, i in lengths if s < now and lengths[s, name, i] > 4 * (now - s)}
        new_prompts = {f"p/{3 * now + k}" for k in range(3)}
        requested = {(name, i) for (s, name, i), n in lengths.items() if s <= now and n > 4 * (now - s)}
        requested |= {(name, i) for name, i in LOST if name in new_prompts}
        assert {(name, i) for step, name, siblings in calls if step == now for i in siblings} == requested
        carried = {(s, name, i) for (s, name, i), n in lengths.items() if s <= now and n > 4 * (now - s + 1)}
        waiting = {(s, name) for s, name, _ in carried}
        closing = (open_before | {(now, name) for name in new_prompts}) - waiting
        trained = [key for key in lengths if key[:2] in closing]
        assert metrics[now]["rollouts"] == len(trained)
        assert metrics[now]["carried_rollouts"] == len(carried)
        if trained:
            assert metrics[now]["response_tokens"] == pytest.approx(sum(lengths[k] for k in trained) / len(trained))
            # Two updates per training step; the tokens of a rollout over three steps are 2, 1 and 0 steps old.
            has_updates = [metrics[step]["trained_tokens"] > 0 for step in range(now)]
            staleness = [
                2 * sum(has_updates[s + position // 4 :])
                for s, name, i in trained
                for position in range(lengths[s, name, i])
            ]
            assert metrics[now]["staleness_mean"] == pytest.approx(sum(staleness) / len(staleness))
            assert metrics[now]["staleness_max"] == max(staleness)
    assert metrics[0]["rollouts"] == 0
    # No group closes before the third step, so there is no update and no token is older than the weights.
    assert [row["updates"] for row in metrics] == [0, 0, 2, 2, 2]
    assert [metrics[step]["staleness_max"] for step in (2, 3, 4)] == [0, 2, 4]


@pytest.mark.parametrize(("parallel", "waiting"), [({}, {"partial_tokens": 4}), (TP, {"refills": 2, "n": 8})])
def test_group_rewards_and_subsets_equal_those_of_one_process(worlds, directory, tmp_path, parallel, waiting):
    """The function sees complete groups only, also those that wait for the next step and for a resumed run."""
    score = f"[len(responses) == {waiting.get('n', 32)} and sum(a[-1:] < b[-1:] for b in responses) for a in responses]"
    (tmp_path / "own.py").write_text(f"def score(row, responses, answers):\n    return {score}\n")
    algo = {"train_on": 5, "mini_batches": 2, "mini_batch_of": "siblings"}
    reward = {"group_function": f"{tmp_path}/own.py:score"}
    changes = {"rollout": {"prompts": 3, **waiting}, "reward": reward, "algo": algo}
    (expected,) = worlds(1).run("steps:run_steps", directory, {}, changes, steps=5, faults={})
    trained_steps = 5 if "n" in waiting else 3  # Partial rollouts close no group in the first two steps.
    assert [row["group_errors"] for row in expected[0] if row["updates"]] == [0.0] * trained_steps
    results = worlds(2).run("steps:resumed", directory, parallel, changes, steps=5, stop_at=3, root=str(tmp_path))
    assert_same(results, expected)
    for metrics, weights, metrics_after, weights_after in results:
        assert [repr(m) for m in metrics_after] == [repr(m) for m in metrics[3:]]  # some are NaN
        assert all(torch.equal(weights_after[name], value) for name, value in weights.items())


@pytest.mark.parametrize(("size", "parallel"), [(1, {}), (4, TP)])
def test_evaluation_divides_by_the_survivors(worlds, directory, size, parallel):
    lose = {("p/1000", 0), *(("p/1002", i) for i in range(4)), ("p/1004", 2), ("p/1004", 3)}
    samples = [responses(3, p, n=4, tokens=12, lost=lose, stream="evaluate") for p in fakes.prompts(5, first=1000)]
    rewards = [list(map(right, rows)) for rows in samples if rows]
    tokens = [len(row) for rows in samples for row in rows]
    assert [len(r) for r in rewards] == [3, 4, 4, 2]
    for evaluation in worlds(size).run("steps:evaluation", directory, parallel, lose):
        assert evaluation["pass_at_1"]["mean"] == pytest.approx(sum(sum(r) / len(r) for r in rewards) / len(rewards))
        for k in (1, 2, 4):
            enough = [r for r in rewards if len(r) >= k]
            expected = sum(pass_at_k(len(r), int(sum(r)), k) for r in enough) / len(enough)
            assert evaluation["pass_at_k"][str(k)] == pytest.approx(expected)
        assert evaluation["mean_reward"]["mean"] == evaluation["pass_at_1"]["mean"]  # rewards of 0 and 1
        assert evaluation["verifiers"] == ["exact"]
        assert evaluation["response_tokens"] == pytest.approx(sum(tokens) / len(tokens))
        assert (evaluation["prompts"], evaluation["samples"], evaluation["lost"]) == (5, 4, len(lose))


def test_the_critic_warm_up_does_not_change_the_actor(worlds, directory, single):
    """With critic.warmup_steps = 1 the first step changes the critic and not the actor."""
    job = ("steps:run_steps", directory, {}, VARIANTS["critic"])
    ((metrics, weights, _),) = worlds(1).run(*job, steps=1, faults={"lose": LOST})
    ((_, before, _),) = worlds(1).run(*job, steps=0, faults={})
    assert all(torch.equal(weights[name], before[name]) for name in before)
    assert (metrics[0]["updates"], metrics[0]["critic_updates"]) == (0, 4)  # 2 epochs of 2 mini-batches
    assert metrics[0]["explained_variance"] == 0.0
    longer_run, moved, _ = single("critic", LOST)
    assert (longer_run[1]["updates"], longer_run[1]["critic_updates"]) == (4, 4)
    assert longer_run[1]["explained_variance"] != 0.0
    assert any(not torch.equal(moved[name], before[name]) for name in before)


def test_rollouts_do_not_depend_on_ranks_or_neighbours(worlds, directory):
    """The random numbers are the same. If a token differs, its number is at a boundary between two tokens."""
    prompt_numbers = [0, 1]
    n = 128
    (together,) = worlds(1).run("steps:draw", directory, {}, prompt_numbers, n, max_rows=4096)
    assert set(together) == set(product((f"p/{i}" for i in prompt_numbers), range(n)))
    divided = {"alone": [worlds(1).run("steps:draw", directory, {}, [i], n, max_rows=300)[0] for i in prompt_numbers]}
    for layout in ({}, {"tensor": 2}):
        divided[str(layout)] = worlds(2).run("steps:draw", directory, layout, prompt_numbers, n, max_rows=4096)
    for name, shares in divided.items():
        rollouts = {slot: rollout for share in shares for slot, rollout in share.items()}
        assert sum(map(len, shares)) == len(rollouts)
        assert rollouts.keys() == together.keys()
        differing = [slot for slot in together if together[slot].tokens != rollouts[slot].tokens]
        assert len(differing) <= 1, name
        for slot, a in together.items():
            b = rollouts[slot]
            common = min(len(a.tokens), len(b.tokens))
            assert a.uniforms[:common] == b.uniforms[:common]
        for slot in differing:
            a = together[slot]
            b = rollouts[slot]
            i = next(i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y)
            gap = (a.logits[i] - b.logits[i]).abs().max().item()
            cdf = a.logits[i].double().softmax(-1).cumsum(-1)
            boundary = cdf[min(a.tokens[i], b.tokens[i])].item()
            assert gap <= 1e-4
            assert abs(a.uniforms[i] - boundary) <= 1e-5


def test_the_rollout_log_does_not_depend_on_ranks(worlds, directory, tmp_path):
    """Each rank writes its own rollouts to the log; the files together do not depend on the number of ranks."""
    changes = {"rollout": {"n": 16}, "run": {"seed": 3, "record_groups": 2}}
    one = tmp_path / "one"
    two = tmp_path / "two"
    files_of_one = worlds(1).run("steps:recorded", directory, {}, changes, str(one))
    files_of_two = worlds(2).run("steps:recorded", directory, TP, changes, str(two))
    assert [len(names) for names in files_of_one + files_of_two] == [3, 3, 3]  # of two steps and an evaluation
    assert entries(one) == entries(two)
    for moment in entries(one):
        for read in (read_groups, read_rollouts):
            rows = read(one, moment).to_pylist()
            assert rows
            assert read(two, moment).to_pylist() == rows


def test_a_barrier_names_the_missing_rank():
    """Ranks may be apart longer than a collective's timeout; a missing rank is named and breaks the world."""
    world = World(2)
    try:
        message, _ = world.run("steps:meeting", timeout=60)
    finally:
        world.close()
    assert "Ranks 1 failed to pass monitoredBarrier in 3500 ms" in message  # 0.5 s + 3 s of steps.meeting
