"""The live mass balance of a whole step against transformers' softmax and the engine's random streams."""

from __future__ import annotations

import math

import fakes
import numpy as np
import pytest
import tiny
import torch
from by_hand import responses, right
from dist.steps import configured, make_trainer

from megatron_brorl.ops.philox import stream_key, uniforms
from megatron_brorl.train import diagnostics

N = 200
TOKENS = 12
POSITIONS = 40  # diagnostics.POSITIONS
DEPTH = 3  # diagnostics.MAX_POSITION
TEMPERATURE = 0.8
CHANGES = {"rollout": {"n": N, "prompts": 3, "temperature": TEMPERATURE}}


@pytest.fixture(scope="module")
def step(processes, model):
    """Return the metrics of one step."""
    trainer = make_trainer(model[0], processes, configured(CHANGES), fakes.Engine())
    trainer.sync_weights()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diagnostics, "MAX_POSITION", DEPTH)
        patch.setattr(diagnostics, "PROMPTS", 2)
        patch.setattr(diagnostics, "POSITIONS", POSITIONS)
        return trainer.train_step()[0]


def sampled_responses(prompt):
    """Return responses with their stop token, and whether they are right."""
    rows = responses(seed=3, prompt=prompt, n=N, tokens=TOKENS)
    return rows, np.array([right(row) == 1 for row in rows])


def chosen():
    """Return two of the three prompts by the keyed random numbers of the step."""
    key = torch.full((3,), stream_key(3, "theory", 0))
    order = uniforms(key, torch.arange(3), torch.zeros(3, dtype=torch.int64)).argsort()
    return [fakes.prompts(3)[i] for i in sorted(order[:2].tolist())]


def cross_fitted(token: np.ndarray, reward: np.ndarray, p: np.ndarray) -> tuple[float, float]:
    """Return `policy_gradient` and `sampled` of theory.token_level for tokens [n] drawn from p [V].

    They are computed by matrices over pairs and loops over tokens.
    policy_gradient follows eq. 5 of Song et al. 2012, "Feature selection via dependence maximization".
    """
    n = len(token)
    ones = np.ones(len(token))
    same = (token[:, None] == token).astype(float) - np.eye(n)
    product = np.outer(reward, reward) * (1 - np.eye(n))
    criterion = np.trace(same @ product)
    criterion += (ones @ same @ ones) * (ones @ product @ ones) / ((n - 1) * (n - 2))
    criterion -= 2 / (n - 2) * (ones @ same @ product @ ones)
    gradient = (n - 1) / n * criterion / (n * (n - 3))

    # One half of the siblings takes a step, and the other half estimates its value.
    sampled = 0.0
    for offset in (0, 1):
        half = slice(offset, None, 2)
        other_half = slice(1 - offset, None, 2)
        tokens = set(token[half].tolist())
        mean = reward[half].mean()
        weights = {j: reward[half][token[half] == j].mean() - mean for j in tokens}  # R_j by token j
        s_r = sum(p[j] * r_j for j, r_j in weights.items())
        centred = reward[other_half] - reward[other_half].mean()
        for j in tokens:
            value = centred[token[other_half] == j].sum() / (len(centred) - 1)
            sampled += value * p[j] * (weights[j] - s_r) / n / 2
    return float(gradient), float(sampled)


def by_hand(model):
    """Return the metrics: means over the positions of a prompt, averaged over two prompts by their shared tokens."""
    count = 2 * POSITIONS
    key = torch.full((count,), stream_key(3, "theory", 0))
    draws = uniforms(key, torch.arange(count), torch.ones(count, dtype=torch.int64)).view(2, -1).tolist()
    prompt_means = []
    finite_shares = []
    shared_tokens = []
    tokens = 0
    for prompt, numbers in zip(chosen(), draws, strict=True):
        rows, are_right = sampled_responses(prompt)
        tokens += sum(map(len, rows))
        rows_with_prefix = {}
        for i, row in enumerate(rows):
            for t in range(min(len(row), DEPTH)):
                rows_with_prefix.setdefault(tuple(row[:t]), []).append(i)
        shared = [
            (i, t)
            for i, row in enumerate(rows)
            for t in range(min(len(row), DEPTH))
            if len(rows_with_prefix[tuple(row[:t])]) >= 2
        ]
        at_positions = []
        for u in numbers:
            i, t = shared[int(u * len(shared))]
            prefix = rows[i][:t]
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt.token_ids, *prefix]])).logits[0, -1]
            p = (logits.double() / TEMPERATURE).softmax(-1).numpy()
            siblings = rows_with_prefix[tuple(prefix)]
            next_token = np.array([rows[j][t] for j in siblings])
            reward = are_right[siblings].astype(float)
            q = reward.mean()
            n = len(siblings)
            sampled = np.isin(np.arange(tiny.VOCAB), next_token)
            r_j = np.array([reward[next_token == j].mean() - q if sampled[j] else 0.0 for j in range(tiny.VOCAB)])
            s_r = r_j @ p
            gradient, sampled_change = cross_fitted(next_token, reward, p) if n >= 4 else (math.nan, math.nan)
            # The change of q from undrawn tokens lies between its values if all of these are wrong (0) or right (1).
            step = p * (r_j - s_r) / n
            bounds = np.array([(p * (value - q) * step)[~sampled].sum() for value in (0.0, 1.0)])
            at_positions.append(
                {
                    "exact/unsampled_mass": p[~sampled].sum(),
                    "exact/unsampled_2": (p[~sampled] ** 2).sum(),
                    "exact/s_r": s_r,
                    "exact/a2": (p[r_j > 0] ** 2).sum(),
                    "exact/b2": (p[r_j < 0] ** 2).sum(),
                    "exact/siblings": n,
                    "estimate/success": q,
                    "estimate/sampled": sampled_change,
                    "estimate/policy_gradient": gradient,
                    "bound/unsampled_low": bounds.min(),
                    "bound/unsampled_high": bounds.max(),
                }
            )
        assert sum(f["exact/siblings"] >= 4 for f in at_positions) > POSITIONS / 2
        means = {k: np.nanmean([f[k] for f in at_positions]) for k in at_positions[0]}
        prompt_means.append(means)
        finite_shares.append({k: np.mean(np.isfinite([f[k] for f in at_positions])) for k in at_positions[0]})
        shared_tokens.append(len(shared))
    # Positions with an unknown value do not count.
    weights = {k: [n * f[k] for n, f in zip(shared_tokens, finite_shares, strict=True)] for k in prompt_means[0]}
    averages = {k: np.average([f[k] for f in prompt_means], weights=weights[k]) for k in prompt_means[0]}
    return averages | {"exact/shared_tokens": sum(shared_tokens) / tokens}


def test_token_level_metrics(step, model):
    metrics = by_hand(model[1])
    for name, expected in metrics.items():
        assert step[f"theory_{name}"] == pytest.approx(expected, rel=2e-4, abs=1e-9), name
    assert 0 < metrics["exact/unsampled_mass"] < 1


def test_answers(step):
    """The fake tokenizer prints tokens, so an answer is a response without its stop token. A cut one has none."""
    distinct = []
    singles = []
    new_of_two = []
    for prompt in fakes.prompts(3):
        rows, _ = sampled_responses(prompt)
        answers = [tuple(row[:-1]) if row[-1] == fakes.STOP else None for row in rows]
        times = np.array([answers.count(a) for a in set(answers)])
        distinct.append(len(times))
        singles.append((times == 1).sum())
        # A held-out sibling is new if its answer occurs once, or if only the other held-out sibling has it, too.
        new_of_two.append(((times == 1).sum() + 2 * (times == 2).sum() / (N - 1)) / N)
    assert step["theory_good_turing/distinct"] == pytest.approx(np.mean(distinct))
    assert step["theory_good_turing/singletons"] == pytest.approx(np.mean(singles))
    assert step["theory_good_turing/unseen_mass"] == pytest.approx(np.mean(singles) / N)
    assert step["theory_hold_out/unsampled_mass_2"] == pytest.approx(np.mean(new_of_two))
    counts = [int(k.rsplit("_", 1)[1]) for k in step if k.startswith("theory_hold_out/u_pos2_") and k[-1].isdigit()]
    assert counts == [2, 4, 8, 16, 32, 64]


def test_every_second_step(processes, model):
    trainer = make_trainer(model[0], processes, configured(CHANGES | {"theory": {"every": 2}}), fakes.Engine())
    trainer.sync_weights()
    diagnosed = [any(k.startswith("theory_") for k in trainer.train_step()[0]) for _ in range(3)]
    assert diagnosed == [True, False, True]
