"""Unequal groups: the expected gradient by enumeration, and whole steps by hand."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import fakes
import numpy as np
import pytest
import torch
from dist.steps import configured, make_trainer

from megatron_brorl.config.schema import Advantage, AlgoConfig
from megatron_brorl.ops.philox import stream_key
from megatron_brorl.theory.allocation import least_of, second_round
from megatron_brorl.train.adaptive import Rounds, even_metrics, raw_advantages
from megatron_brorl.train.groups import LENGTH, LOST, STOP, Outcomes, select

P = [np.array([0.2, 0.5, 0.3]), np.array([0.35, 0.3, 0.35])]  # of three answers to each of two prompts
REWARD = [np.array([1.0, 0.0, 0.0]), np.array([1.0, 1.0, 0.0])]
N, FIRST = 8, 2


def outcomes_of(rewards: Sequence[Sequence[float]]) -> Outcomes:
    """Ragged groups; what is missing counts as lost."""
    width = max(map(len, rewards))
    table, state = torch.zeros(len(rewards), width), torch.full((len(rewards), width), LOST)
    for g, row in enumerate(rewards):
        table[g, : len(row)] = torch.tensor(row)
        state[g, : len(row)] = STOP
    none = torch.zeros(len(rewards), width, dtype=torch.int64)
    return Outcomes(state, table, table == 1, none, none, none, none)


def draws(prompt: int, n: int):
    """Every multiset of n answers as a list, with its probability."""
    for answers in itertools.combinations_with_replacement(range(3), n):
        counts = [answers.count(k) for k in range(3)]
        ways = math.factorial(n) / math.prod(math.factorial(c) for c in counts)
        yield list(answers), ways * math.prod(float(p) ** c for p, c in zip(P[prompt], counts, strict=True))


def gradient(prompt: int, answers: Sequence[int], factors: np.ndarray) -> np.ndarray:
    """Sum over rollouts of factor times the gradient of log p on the prompt's logits."""
    return sum(f * (np.eye(3)[a] - P[prompt]) for f, a in zip(factors, answers, strict=True))


def in_rounds(prompt: int, first: list[int], second: list[int], kind: Advantage, rounds: Rounds) -> np.ndarray:
    answers = [*first, *second]
    found = outcomes_of([REWARD[prompt][answers].tolist()])
    advantages, weights = raw_advantages(found, [0], rounds, AlgoConfig(advantage=kind, pass_k=2))
    return gradient(prompt, answers, (advantages * weights).double().numpy()[0])


@pytest.mark.slow
def test_expected_gradient_is_that_of_equal_groups():
    """Over every outcome of both rounds of two prompts, whose second rounds depend on both of their first ones."""
    uniform = []
    for k in range(2):
        total = np.zeros(3)
        for answers, chance in draws(k, N):
            r = REWARD[k][answers]
            total += chance * gradient(k, answers, r - r.mean())
        uniform.append(total)

    @functools.cache
    def part(prompt: int, first: tuple[int, ...], more: int) -> np.ndarray:
        return sum(
            chance * in_rounds(prompt, [*first], second, "reinforce_pp_baseline", Rounds(N, FIRST))
            for second, chance in draws(prompt, more)
        )

    adaptive, pooled, given = [np.zeros(3), np.zeros(3)], np.zeros(3), set()
    for (a, chance_a), (b, chance_b) in itertools.product(draws(0, FIRST), draws(1, FIRST)):
        right = np.array([int(REWARD[0][a].sum()), int(REWARD[1][b].sum())])
        counts = np.array([2, 10, 4])[right] + right[::-1]  # any rule will do
        given.add(tuple(counts.tolist()))
        for k, answers in enumerate((a, b)):
            adaptive[k] += chance_a * chance_b * part(k, tuple(answers), int(counts[k]))
        # One mean over both rounds, and every prompt weighing as much: what must not be done.
        for second, chance in draws(0, int(counts[0])):
            r = REWARD[0][[*a, *second]]
            pooled += chance_a * chance_b * chance * N / len(r) * gradient(0, [*a, *second], r - r.mean())
    assert len(given) > 5
    for k in range(2):
        np.testing.assert_allclose(adaptive[k], uniform[k], rtol=1e-5, atol=1e-7)
    assert np.abs(pooled - uniform[0]).max() > 0.01 * np.abs(uniform[0]).max()


@pytest.mark.parametrize(("kind", "orders"), [("pass_at_k", {2: 2.0}), ("maxrl", {1: 1.0, 2: 1.0})])
def test_objectives_of_width_keep_their_gradient(kind, orders):
    """Rounds of 3 and 3 to 5, by what the first brought: n times sum of w_k (1 - p)^(k - 1) grad p all the same."""
    rounds = Rounds(6, 3)
    assert rounds.order == 1  # of the fewest rollouts that a second round may have: two
    rounds = Rounds(24, 3)
    assert rounds.order == 2
    for prompt in range(2):
        total = np.zeros(3)
        for first, chance in draws(prompt, 3):
            more = 3 + int(REWARD[prompt][first].sum()) % 3
            total += chance * sum(w * in_rounds(prompt, first, x, kind, rounds) for x, w in draws(prompt, more))
        p = float(P[prompt] @ REWARD[prompt])
        slope = P[prompt] * (REWARD[prompt] - p)  # grad p on the logits
        wanted = 24 * sum(w * (1 - p) ** (k - 1) for k, w in orders.items()) * slope
        np.testing.assert_allclose(total, wanted, rtol=1e-5, atol=1e-6)


def test_survivors_stand_for_those_that_are_lost():
    """Of three and five rollouts one and two are lost: each round's weights still add up to its part of n."""
    found = outcomes_of([[1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0]])
    state = found.state.clone()
    state[0, [1, 3, 6]] = LOST
    survivors = Outcomes(state, *list(vars(found).values())[1:])
    advantages, weights = raw_advantages(survivors, [0], Rounds(8, 3), AlgoConfig())
    assert weights[0].tolist() == pytest.approx([1.5, 0, 1.5, 0, 5 / 3, 5 / 3, 0, 5 / 3])
    scale = 7 / 8
    first, second = 2 * scale, 1.5 * scale
    expected = [first * 0.5, 0, -first * 0.5, 0, second * 2 / 3, -second / 3, 0, -second / 3]
    assert advantages[0].tolist() == pytest.approx(expected)


def test_second_round_goes_where_it_helps():
    """Even odds need the least to bring both verdicts and the most to be certain of; the budget is kept."""
    right, n = np.array([0, 16, 8, 1, 15, 0, 16, 0]), np.full(8, 16)
    kept, variance = (second_round(right, n, 48, objective) for objective in ("kept", "variance"))
    for counts in (kept, variance):
        assert 8 * 48 - least_of(48) < counts.sum() <= 8 * 48
        assert counts.min() >= least_of(48) == 6
    assert kept[2] == 6 < np.delete(kept, 2).min()
    assert variance[2] > np.delete(variance, 2).max()


def sampled(prompt, siblings: Sequence[int]):
    rows, rewards = [], []
    for drawn in fakes.draws(stream_key(3, 0, prompt.id), siblings, 12):
        stopped = fakes.STOP in drawn
        rows.append(drawn[: drawn.index(fakes.STOP) + 1] if stopped else drawn)
        rewards.append(float(stopped and sum(rows[-1][:-1]) % 2 == 0))
    return rows, rewards


def test_a_whole_step_by_hand(processes, model):
    """Allocation, loss, gradient and figures of 3 prompts x 32 rollouts, with transformers' model."""
    n, first = 32, 8
    config = configured({"rollout": {"n": n, "prompts": 3, "adaptive": "variance"}, "algo": {"entropy_coef": 0.1}})
    engine = fakes.Engine()
    trainer = make_trainer(model[0], processes, config, engine)
    trainer.refit()
    values, _ = trainer.train_step()
    prompts = fakes.prompts(3)
    begun = [sampled(p, range(first)) for p in prompts]
    counts = second_round(np.array([int(sum(r)) for _, r in begun]), np.full(3, first), n - first, "variance")
    assert len(set(counts.tolist())) > 1
    asked = [{(r.prompt.id, i) for r in call for i in range(r.first, r.first + r.n)} for call in engine.calls]
    assert asked[0] == {(p.id, i) for p in prompts for i in range(first)}
    assert asked[1] == {(p.id, first + i) for p, k in zip(prompts, counts, strict=True) for i in range(k)}
    rounds = [part for p, k in zip(prompts, counts, strict=True)
              for part in (sampled(p, range(first)), sampled(p, range(first, first + int(k))))]  # fmt: skip
    raw, weights = [], []
    for i, (_, rewards) in enumerate(rounds):
        k = len(rewards)
        raw += [(r - sum(rewards) / k) * k / (k - 1) * (n - 1) / n for r in rewards]
        weights += [((n - first) if i % 2 else first) / k] * k
    variance = sum(w * x * x for w, x in zip(weights, raw, strict=True)) / sum(weights)
    model[1].zero_grad()
    total, size, at = torch.zeros((), dtype=torch.float64), 0.0, 0
    for i, (rows, _) in enumerate(rounds):
        for row in rows:
            prompt = prompts[i // 2].token_ids
            logits = model[1](torch.tensor([[*prompt, *row]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            lp = logits[torch.arange(len(row)), torch.tensor(row)]
            cap = (lp.detach() - torch.tensor([fakes.log_prob(t, 0) for t in row])).exp().clamp(max=config.algo.is_cap)
            entropy = -(logits.exp() * logits).sum(-1)
            objective = cap * (lp - lp.detach()).exp() * raw[at] / math.sqrt(variance) + 0.1 * entropy
            total = total - weights[at] * objective.double().sum()
            size += weights[at] * len(row)
            at += 1
    (total / size).backward()
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model[1].parameters()))
    assert values["loss"] == pytest.approx(float(total.detach()) / size, rel=1e-5)
    assert values["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert values["rollouts"] == len(raw) <= 3 * n
    assert values["reward"] == pytest.approx(sum(sum(r) for _, r in begun) / (3 * first))  # of even groups
    assert (values["group_size_least"], values["group_size_most"]) == (first + counts.min(), first + counts.max())


def test_even_metrics_without_rounds():
    found = outcomes_of([[1.0, 0.0]])
    assert even_metrics(select(found), None) == {}
    assert LENGTH not in found.state
