"""Length and repetition terms, mismatch masks and learning rates against their equations."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_brorl.algo.policy_loss import mismatch_mask
from megatron_brorl.algo.shaping import cosine_length, cycle_is_on, repeated_ngrams, shaped, soft_overlong
from megatron_brorl.config.schema import OptimConfig
from megatron_brorl.config.shaping import ShapingConfig
from megatron_brorl.train.learning_rate import learning_rate, scaled


def test_soft_overlong_penalty():
    """DAPO, eq. 13, with L_max = 20480 and L_cache = 4096."""

    def penalty(length):
        if length <= 20480 - 4096:
            return 0.0
        return (20480 - 4096 - length) / 4096 if length <= 20480 else -1.0

    lengths = [1, 16383, 16384, 16385, 18432, 20479, 20480]
    assert soft_overlong(torch.tensor(lengths), 20480, 4096).tolist() == [penalty(n) for n in lengths]


def test_cosine_length_reward():
    """eta_min + (eta_max - eta_min) (1 + cos(pi t / T)) / 2 (ProRLv2)."""
    found = cosine_length(torch.tensor([0, 25, 50, 75, 100]), 100, -0.5, 0.25).tolist()
    half = math.sqrt(0.5)
    assert found == pytest.approx([0.25, -0.5 + 0.375 * (1 + half), -0.125, -0.5 + 0.375 * (1 - half), -0.5])


def test_the_cosine_term_is_on_for_some_steps_of_a_cycle():
    assert [step for step in range(14) if cycle_is_on(step, 2, 5)] == [0, 1, 7, 8]
    assert all(cycle_is_on(step, 0, 0) for step in range(3))


def test_repeated_ngrams_are_counted_by_looking_back():
    ids = torch.randint(0, 3, (60,), generator=torch.Generator().manual_seed(0))
    text = ids.tolist()
    for n in (1, 2, 4):
        seen = []
        repeated = 0
        for i in range(len(text) - n + 1):
            repeated += text[i : i + n] in seen
            seen.append(text[i : i + n])
        assert repeated_ngrams(ids, n) == repeated > 0
        sampled = torch.arange(60) % 11 > 3
        own = [text[i : i + n] for i in range(len(text) - n + 1) if all(sampled[i : i + n])]
        assert repeated_ngrams(ids, n, sampled) == len(own) - len({tuple(x) for x in own}) > 0
    assert repeated_ngrams(ids[:3], 4, sampled[:3]) == 0
    assert repeated_ngrams(ids[:3], 4) == 0
    assert repeated_ngrams(ids[:4], 4) == 0


def test_terms_add_up_and_the_cosine_is_for_right_responses():
    rewards = torch.tensor([[1.0, 0.0], [0.5, 1.0]])
    tokens = torch.tensor([[10, 10], [20, 5]])
    repeats = torch.tensor([[3, 0], [10, 0]])
    config = ShapingConfig(
        overlong_tokens=15,
        cosine_coef=2.0,
        cosine_on_steps=1,
        cosine_off_steps=1,
        repetition_ngram=2,
        repetition_penalty=0.01,
    )

    def expected(reward, t, again, cosine):
        bonus = 2.0 * (-0.5 + 0.25 * (1 + math.cos(math.pi * t / 20))) if cosine and reward == 1.0 else 0.0
        return reward - max(0, t - 5) / 15 + bonus - 0.01 * again

    for step in (0, 1):
        found = shaped(rewards, rewards == 1, tokens, repeats, config, 20, step)
        cells = zip(rewards.flatten().tolist(), tokens.flatten().tolist(), repeats.flatten().tolist(), strict=True)
        assert found.flatten().tolist() == pytest.approx([expected(*cell, step == 0) for cell in cells])
    assert config.is_on
    assert not ShapingConfig().is_on
    assert torch.equal(shaped(rewards, rewards == 1, tokens, repeats, ShapingConfig(), 20, 0), rewards)


def test_mismatch_masks():
    old = torch.tensor([-1.0, -1.0, -1.0, -50.0])
    rollout = old - torch.tensor([0.0, math.log(5.1), math.log(0.49), math.log(4.9)])
    assert mismatch_mask(old, rollout, "token", 0.5, 5.0).tolist() == [True, False, False, True]
    # The geometric mean of the ratios is (5.1 x 0.49 x 4.9)^(1/4) = 1.87.
    mean = (5.1 * 0.49 * 4.9) ** 0.25
    assert mismatch_mask(old, rollout, "sequence", 0.5, mean + 1e-3).tolist() == [True] * 4
    assert mismatch_mask(old, rollout, "sequence", 0.5, mean - 1e-3).tolist() == [False] * 4
    assert mismatch_mask(old[:0], rollout[:0], "sequence", 0.5, 5.0).tolist() == []


def test_learning_rate_grows_with_the_root_of_the_batch():
    """eta_0 sqrt(B / B_0): 512 x 16 -> 128 x 512 rollouts is 8 times the batch (BroRL, section 4.2.1)."""
    optim = OptimConfig(lr=1e-6, lr_for_rollouts=512 * 16, warmup_steps=4)
    assert scaled(optim, 128 * 512, 7).lr == pytest.approx(1e-6 * math.sqrt(8), rel=1e-12)
    assert scaled(optim, 512 * 16, 7).lr == 1e-6
    assert scaled(OptimConfig(lr=1e-6), 128 * 512, 7).lr == 1e-6
    assert [learning_rate(scaled(optim, 4 * 8192, 7), i) for i in range(6)] == pytest.approx(
        [0.5e-6, 1e-6, 1.5e-6, 2e-6, 2e-6, 2e-6]
    )


def test_learning_rate_of_the_filtered_batch():
    """The rule counts the kept rollouts: 62.5% of 128 groups of 512 are 80 groups, or 40,960 rollouts."""
    optim = OptimConfig(lr=1e-6, lr_for_rollouts=512 * 16, lr_counts="kept")
    assert scaled(optim, 128 * 512, 80 * 512).lr == pytest.approx(1e-6 * math.sqrt(5), rel=1e-12)
    assert scaled(optim, 128 * 512, 128 * 512).lr == pytest.approx(1e-6 * math.sqrt(8), rel=1e-12)
    assert scaled(optim, 128 * 512, 0).lr == 0  # no rollout is kept
    assert scaled(OptimConfig(lr=1e-6, lr_counts="kept"), 128 * 512, 80 * 512).lr == 1e-6
