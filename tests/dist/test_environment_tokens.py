"""A step on rollouts of several turns against a float64 loop over their sampled tokens, in every layout."""

from __future__ import annotations

import math
import statistics

import pytest
import tiny
import torch
from dist.test_ppo import Critic, distribution, log_probs, values
from dist.world import pairs

from megatron_brorl.config.schema import AlgoConfig
from megatron_brorl.types import Episode, Prompt, PromptGroup, Rollout, ScoredRollout, ScoreResult

pytestmark = pytest.mark.slow
LAYOUTS = [(1, {}, "fused"), (1, {}, "reference"), *((2, p, "fused") for p in ({}, {"tensor": 2}, {"pipeline": 2}))]
# Lengths of the turns and observations in order; the model begins.
TURNS = [
    [5, 3, 4, 2, 6],
    [0, 2, 3, 4, 1, 1, 7],  # an observation comes first
    [2, 5, 3, 2, 4, 3],  # rollout.max_tokens cuts off the last observation
    [8],
    [1, 1, 1, 1, 1],
    [0, 6],  # the first observation fills rollout.max_tokens
    [9, 4, 2],
    [3, 8, 1, 2, 5],
]
PROMPTS = [(5, 9, 17), (40, 3, 8, 77, 21)]
N = len(TURNS)
CASES = {
    "group": AlgoConfig(
        kl_coef=0.05,
        kl_estimator="k3",
        entropy_coef=0.01,
        mismatch_mask="sequence",
        mismatch_bounds=(0.9, 1.5),
        is_cap=1.1,
        aggregation="sequence_mean",
        correct_boost=0.25,
    ),
    "gae": AlgoConfig(
        advantage="gae",
        gamma=0.98,
        lam=0.9,
        kl_coef=0.05,
        kl_in="reward",
        kl_estimator="k1",
        mismatch_mask="token",
        mismatch_bounds=(0.8, 1.3),
        entropy_coef=0.01,
        aggregation="token_mean",
    ),
    "gspo": AlgoConfig(
        advantage="grpo",
        ratio="sequence",
        eps_low=0.05,
        eps_high=0.05,
        old_log_probs="rollout",
        distill_coef=0.1,
        aggregation="fixed",
        aggregation_tokens=10,
    ),
}


def made_rollouts(actor):
    """Return the groups, and rollouts whose log-probabilities differ a little from the actor's."""
    g = torch.Generator().manual_seed(0)
    groups = [PromptGroup(Prompt(f"p{i}", "", ids, None, "exact"), 0, i) for i, ids in enumerate(PROMPTS)]
    scored = []
    for group, prompt in enumerate(PROMPTS):
        for sibling, turns in enumerate(TURNS):
            sampled = torch.tensor([i % 2 == 0 for i, length in enumerate(turns) for _ in range(length)])
            ids = torch.randint(3, tiny.VOCAB, (len(sampled),), generator=g)
            with torch.no_grad():
                exact = log_probs(actor, torch.tensor(prompt), ids)
            noisy = (exact + 0.3 * torch.randn(len(ids), generator=g)).float() * sampled
            reward = (sibling + group) % 3 / 2
            episode = Episode(sampled, len(turns) // 2, 1, 0, ScoreResult(reward, "ok"))
            finish = "stop" if sampled[-1] else "length"
            rollout = Rollout(sibling, ids, noisy, finish, ((0, len(ids)),), episode)
            scored.append(ScoredRollout(group, rollout, reward, reward == 1, score=episode.score))
    return groups, scored


def kl(d, estimator):
    return d if estimator == "k1" else (-d).exp() - 1 + d


def of_groups(scored, kind):
    """Return the advantage of each rollout, or its reward for GAE."""
    rewards = [r.reward for r in scored]
    siblings = [[r.reward for r in scored if r.group == own.group] for own in scored]
    centred = [reward - statistics.fmean(all_) for reward, all_ in zip(rewards, siblings, strict=True)]
    if kind == "grpo":
        return [c / (statistics.stdev(all_) + 1e-6) for c, all_ in zip(centred, siblings, strict=True)]
    return rewards if kind == "gae" else [c / statistics.pstdev(centred) for c in centred]


def loop(actor, other, head, scored, algo):
    """Return loss, metrics, and for each rollout advantages, returns and mask by position, in float64."""
    critic = Critic(actor)
    critic.value_head.data.copy_(head)
    rows = [(torch.tensor(PROMPTS[r.group]), r.rollout.token_ids) for r in scored]
    places = [[t for t, own in enumerate(r.rollout.episode.sampled.tolist()) if own] for r in scored]
    count = sum(map(len, places))
    filled = sum(1 for own in places if own)
    engine = [r.rollout.log_probs.double() for r in scored]
    with torch.no_grad():
        now = [log_probs(actor, *row) for row in rows]
        fixed = [log_probs(other, *row) for row in rows]
        v = [values(critic, *row) for row in rows]
    old = engine if algo.old_log_probs == "rollout" else now

    advantages, returns = [], []
    for i, a in enumerate(of_groups(scored, algo.advantage)):
        found = dict.fromkeys(places[i], a)
        goals = {}
        after, next_value = 0.0, 0.0
        for t in reversed(places[i]) if algo.advantage == "gae" else ():
            reward = (a if t == places[i][-1] else 0.0) - algo.kl_coef * float(kl(old[i][t] - fixed[i][t], "k1"))
            value = float(v[i][t])
            after = reward + algo.gamma * next_value - value + algo.gamma * algo.lam * after
            next_value = value
            found[t], goals[t] = after, after + value
        advantages.append(found)
        returns.append(goals)
    if algo.advantage == "gae":
        flat = [a for row in advantages for a in row.values()]
        mean, std = statistics.fmean(flat), statistics.pstdev(flat)
        advantages = [{t: (a - mean) / std for t, a in row.items()} for row in advantages]
    for i, row in enumerate(advantages):
        for t in row:
            row[t] += algo.correct_boost * scored[i].right - algo.distill_coef * float(old[i][t] - fixed[i][t])

    masks = []
    for i, own in enumerate(places):
        gaps = [float(now[i][t] - engine[i][t]) for t in own]
        if algo.mismatch_mask == "sequence" and own:
            gaps = [statistics.fmean(gaps)] * len(own)
        low, high = algo.mismatch_bounds if algo.mismatch_mask != "off" else (0.0, math.inf)
        masks.append([t for t, gap in zip(own, gaps, strict=True) if low <= math.exp(gap) <= high])

    loss = torch.zeros(()).double()
    sums = dict.fromkeys(("entropy", "kl", "gap", "clipped"), 0.0)
    for i, live in enumerate(masks):
        if not live:
            continue
        divisors = {
            "token_mean": count,
            "sequence_mean": len(places[i]) * filled,
            "fixed": algo.aggregation_tokens * filled,
        }
        weight = 1 / divisors[algo.aggregation]
        every = distribution(actor, *rows[i])
        lp = [every[t, rows[i][1][t]] for t in live]
        mean = sum(x - old[i][t] for x, t in zip(lp, live, strict=True)) / len(live)
        for x, t in zip(lp, live, strict=True):
            ratio = (mean if algo.ratio == "sequence" else x - old[i][t]).exp()
            a = advantages[i][t]
            objective = torch.minimum(ratio * a, ratio.clamp(1 - algo.eps_low, 1 + algo.eps_high) * a)
            sums["clipped"] += float(objective != ratio * a)
            if algo.is_cap:
                objective = objective * (old[i][t] - engine[i][t]).exp().clamp(max=algo.is_cap)
            penalty = kl(x - fixed[i][t], algo.kl_estimator) if algo.kl_coef and algo.kl_in == "loss" else 0.0
            entropy = -(every[t].exp() * every[t]).sum()
            loss = loss + weight * (algo.kl_coef * penalty - objective - algo.entropy_coef * entropy)
            sums["entropy"] += entropy.item()
            sums["kl"] += float(torch.as_tensor(penalty).detach())
            sums["gap"] += abs(float(now[i][t] - engine[i][t]))
    live_count = sum(map(len, masks))
    metrics = {
        "loss": loss.item(),
        "grad_norm": gradient_norm(actor, loss),
        "trained_tokens": live_count,
        "entropy": sums["entropy"] / live_count,
        "logprob_gap_mean": sums["gap"] / live_count,
    }
    if algo.mismatch_mask != "off":
        metrics["masked_share"] = 1 - live_count / count
    if algo.kl_coef:
        in_reward = [float(now[i][t] - fixed[i][t]) for i, own in enumerate(places) for t in own]
        metrics["reference_kl"] = statistics.fmean(in_reward) if algo.kl_in == "reward" else sums["kl"] / live_count
    if algo.distill_coef:
        gaps = [float(old[i][t] - fixed[i][t]) for i, own in enumerate(places) for t in own]
        metrics["teacher_kl"] = statistics.fmean(gaps)
    if algo.ratio == "sequence":
        metrics["clipped"] = sums["clipped"] / live_count
    if algo.advantage == "gae":
        squares = [
            (values(critic, *rows[i])[t] - goal) ** 2 / 2 for i, row in enumerate(returns) for t, goal in row.items()
        ]
        value_loss = sum(squares) / count
        metrics["value_loss"] = value_loss.item()
        metrics["critic_grad_norm"] = gradient_norm(critic, value_loss)
        metrics["value_mean"] = statistics.fmean(float(v[i][t]) for i, own in enumerate(places) for t in own)
        metrics["return_mean"] = statistics.fmean(goal for row in returns for goal in row.values())
    return metrics, advantages, returns, masks


def gradient_norm(module, loss):
    gradients = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)
    return math.sqrt(sum(float(x.square().sum()) for x in gradients if x is not None))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directories = [tmp_path_factory.mktemp(name) for name in ("actor", "other")]
    made = [tiny.make_model(path, "qwen2", True, seed=i).double() for i, path in enumerate(directories)]
    head = torch.randn(1, made[0].config.hidden_size, generator=torch.Generator().manual_seed(7)) / 10
    return *map(str, directories), *made, head


@pytest.mark.parametrize(("size", "parallel", "ops", "case"), pairs(LAYOUTS, list(CASES)))
def test_a_step_of_several_turns_equals_a_plain_loop(worlds, models, size, parallel, ops, case):
    *directories, actor, other, head = models
    algo = CASES[case]
    groups, scored = made_rollouts(actor)
    expected, advantages, returns, masks = loop(actor, other, head, scored, algo)
    assert 0 < expected.get("masked_share", 0.5) < 1
    assert 0 < expected.get("clipped", 0.5) < 1

    results = worlds(size).run("environment_jobs:step", *directories, parallel, ops, algo, head, groups, scored)
    seen = set()
    for received, experience, metrics in results:
        metrics["clipped"] = metrics["clipped_low"] + metrics["clipped_high"]
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=2e-4, abs=1e-6)
        for row, found in enumerate(received):
            i = found.group * N + found.rollout.index
            seen.add(i)
            sent = scored[i].rollout
            assert torch.equal(found.rollout.token_ids, sent.token_ids)
            assert torch.equal(found.rollout.log_probs, sent.log_probs)
            sampled = sent.episode.sampled
            all_sampled = found.rollout.episode is None
            assert all_sampled == bool(sampled.all())
            assert all_sampled or torch.equal(found.rollout.episode.sampled, sampled)
            assert torch.equal(experience.sampled[row], sampled)
            assert experience.mask[row].nonzero().flatten().tolist() == masks[i]
            columns = {"advantages": advantages[i]} | ({"returns": returns[i]} if algo.advantage == "gae" else {})
            for name, wanted in columns.items():
                at = [wanted.get(t, 0.0) for t in range(len(sampled))]
                assert getattr(experience, name)[row].tolist() == pytest.approx(at, rel=1e-3, abs=1e-4), name
    assert seen == set(range(len(scored)))
