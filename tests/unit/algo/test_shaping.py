"""Length and repetition terms against their equations."""

import math

import pytest
import torch

from megatron_brorl.algo.shaping import repeated_ngrams, shaped
from megatron_brorl.config.schema import ShapingConfig


def test_repeated_ngrams_are_counted_by_looking_back():
    ids = torch.randint(0, 3, (60,), generator=torch.Generator().manual_seed(0))
    id_list = ids.tolist()
    for n in (1, 2, 4):
        for sampled in (None, torch.arange(60) % 11 > 3):
            starts = [i for i in range(60 - n + 1) if sampled is None or all(sampled[i : i + n])]
            ngrams = [id_list[i : i + n] for i in starts]
            repeated = sum(ngram in ngrams[:i] for i, ngram in enumerate(ngrams))
            assert repeated_ngrams(ids, n, sampled) == repeated > 0
    assert repeated_ngrams(ids[:3], 4) == repeated_ngrams(ids[:4], 4) == 0
    assert repeated_ngrams(ids[:3], 4, sampled[:3]) == 0


def test_terms_add_up_and_the_cosine_is_for_right_responses():
    """DAPO, eq. 13, with L_max = 20 and L_cache = 15, and the cosine and repetition terms of ProRLv2."""
    tokens = torch.tensor([[0, 5, 6], [12, 19, 20]] * 2)
    rewards = torch.tensor([[1.0] * 3] * 2 + [[0.5, 0.0, 1.0]] * 2)
    repeats = torch.tensor([[3, 0, 10]] * 4)
    config = ShapingConfig(overlong_tokens=15, cosine_coef=2.0, repetition_ngram=2)

    def expected(reward, length, repeated, with_cosine):
        overlong = 0 if length <= 20 - 15 else (20 - 15 - length) / 15
        cosine = 2.0 * (-0.5 + 0.25 * (1 + math.cos(math.pi * length / 20)))
        bonus = cosine if with_cosine and reward == 1.0 else 0.0
        return reward + overlong + bonus - 0.001 * repeated

    for step in (0, 99, 100, 599, 600, 699, 700):
        result = shaped(rewards, rewards == 1, tokens, repeats, config, max_tokens=20, step=step).flatten().tolist()
        cells = zip(rewards.flatten().tolist(), tokens.flatten().tolist(), repeats.flatten().tolist(), strict=True)
        with_cosine = step in (0, 99, 600, 699)  # the first 100 of every 600 steps
        assert result == pytest.approx([expected(*cell, with_cosine) for cell in cells])
    assert config.is_on
    assert not ShapingConfig().is_on
    unshaped = shaped(rewards, rewards == 1, tokens, repeats, ShapingConfig(), max_tokens=20, step=0)
    assert torch.equal(unshaped, rewards)
