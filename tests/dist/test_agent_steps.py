"""Steps on rollouts with several sequences, against a plain loop in float64 that computes one sequence at a time."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
import tiny
import torch
from dist.agent_jobs import GROUPS, OPTIM, N, scored
from dist.test_ppo import descend, optimizer
from dist.world import pairs

from megatron_brorl.config.schema import AlgoConfig

pytestmark = pytest.mark.slow
COMMON = {"advantage": "grpo", "mini_batches": 2, "mini_batch_of": "siblings", "old_log_probs": "actor", "is_cap": 1.5}
ALGOS = {
    "token_mean": AlgoConfig(aggregation="token_mean", **COMMON),
    "sequence_mean": AlgoConfig(aggregation="sequence_mean", **COMMON),
    "fixed": AlgoConfig(aggregation="fixed", aggregation_tokens=20, **COMMON),
}
LAYOUTS = [(1, {}, {}), (2, {}, {}), (2, {"pipeline": 2}, {"share_prompt": False}), (2, {"tensor": 2}, {})]


def loop(directory, algo):
    """Return the metrics and the weights after both mini-batches."""
    actor = tiny.make_model(directory, "qwen2", True).double()
    adam = optimizer(actor, OPTIM)

    def log_probs(rollout):
        """Return the log-probabilities of the sampled tokens, by one pass per sequence."""
        found = []
        for begin, end in pairwise((*rollout.episode.starts, len(rollout.token_ids))):
            ids, sampled = rollout.token_ids[begin:end], rollout.episode.sampled[begin:end]
            table = actor(ids[None]).logits[0, :-1].log_softmax(-1)
            found.append(table.gather(-1, ids[1:, None])[:, 0][sampled[1:]])
        return torch.cat(found)

    rows = scored()
    with torch.no_grad():
        old = [log_probs(r.rollout) for r in rows]
    metrics = {"loss": [], "grad_norm": []}
    for batch in range(2):
        members = [i for i, r in enumerate(rows) if r.rollout.index % 2 == batch]
        lengths = [int(rows[i].rollout.episode.sampled.sum()) for i in members]
        loss = torch.zeros(()).double()
        for i, length in zip(members, lengths, strict=True):
            r = rows[i].rollout
            current = log_probs(r)
            engine = r.log_probs[r.episode.sampled].double()
            ratio = (current - old[i]).exp()
            advantage = rows[i].reward
            weight = (old[i] - engine).exp().clamp(max=algo.is_cap)
            clipped = ratio.clamp(1 - algo.eps_low, 1 + algo.eps_high)
            total = (-weight * torch.minimum(ratio * advantage, clipped * advantage)).sum()
            divisors = {
                "token_mean": sum(lengths),
                "sequence_mean": len(members) * length,
                "fixed": len(members) * algo.aggregation_tokens,
            }
            loss = loss + total / divisors[algo.aggregation]
        metrics["loss"].append(loss.item())
        metrics["grad_norm"].append(descend(actor, adam, loss, OPTIM))
    return str(directory), {name: sum(values) / 2 for name, values in metrics.items()}, dict(actor.state_dict())


@pytest.fixture(scope="module")
def loops(tmp_path_factory):
    return cache(lambda name: loop(tmp_path_factory.mktemp("model"), ALGOS[name]))


@pytest.mark.parametrize(("size", "parallel", "options", "name"), pairs(LAYOUTS, list(ALGOS)))
def test_steps_equal_a_plain_loop(worlds, loops, size, parallel, options, name):
    """A rollout counts once, whatever the number of its sequences."""
    directory, expected, weights = loops(name)
    assert any(len(r.rollout.episode.starts) == 3 for r in scored())
    for metrics, own in worlds(size).run("agent_jobs:step", directory, parallel, options, ALGOS[name]):
        assert {key: metrics[key] for key in expected} == pytest.approx(expected, rel=1e-6)
        assert metrics["trained_tokens"] == sum(int(r.rollout.episode.sampled.sum()) for r in scored())
        assert metrics["finite_rows"] == sum(len(r.rollout.episode.starts) for r in scored()) > GROUPS * N
        for key, tensor in own.items():
            assert (tensor - weights[key]).norm() <= 1e-5 * weights[key].norm(), key
