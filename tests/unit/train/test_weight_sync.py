"""The limits of train.verify_weights: no false alarm from bfloat16 rounding, and planted faults are found."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from megatron_brorl.config.schema import Config, ModelConfig, RolloutConfig
from megatron_brorl.train.weight_sync import PROMPTS, SIBLINGS, TOKENS, gap_statistics, sudden_gap, tolerance

ENGINES = 64
PER_ENGINE = PROMPTS * SIBLINGS * TOKENS
LIMIT = tolerance(Config(model=ModelConfig(dtype="bf16"), rollout=RolloutConfig(dtype="bf16")), experts=False)
VOCAB = 64


def test_bf16_rounding_gives_no_false_alarm_in_200_rounds():
    """Both sides round the same logits, around 34, where bfloat16 has steps of 0.25.

    Before that, the logits of each side get a relative error of up to 2^-8, that of two bfloat16 roundings.
    """
    g = torch.Generator().manual_seed(5)
    engines = torch.arange(ENGINES).repeat_interleave(PER_ENGINE)
    largest = 0.0
    for _round in range(200):
        exact = 34 + 4 * torch.randn(len(engines), 16, generator=g)
        sides = []
        for _side in range(2):
            inexact = exact * (1 + 2.0**-8 * (2 * torch.rand(exact.shape, generator=g) - 1))
            sides.append(inexact.bfloat16().float().log_softmax(-1))
        token = torch.multinomial(sides[0].exp(), 1, generator=g)
        gaps = (sides[0].gather(1, token) - sides[1].gather(1, token)).abs()[:, 0]
        gap = gap_statistics(gaps, engines)
        assert not gap.exceeds(LIMIT), gap
        largest = max(largest, gap.max)
    assert largest > 0.5  # A limit of 0.5 on the maximum would have raised.


def test_a_gap_above_4_times_the_median_of_the_steps_before_is_a_warning():
    steps = [0.03, 0.01, 0.02, 0.5, 0.02]  # median 0.02
    assert not sudden_gap([*steps, 0.08])
    assert "0.081 nats is 4.0 times" in sudden_gap([*steps, 0.081])
    assert not sudden_gap([0.1, 0.1, 0.1, 1.0])  # too few steps before


@pytest.fixture(scope="module")
def model():
    """Return a random model whose log-probabilities depend on every weight as much as those of a trained one."""
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    hf_model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, p in hf_model.named_parameters():
            if p.dim() == 2:
                p.normal_(0, 1.5 / p.shape[1] ** 0.5)
            if "lm_head" in name:
                p.mul_(3)
    return hf_model


def wrong_layer(engine):
    engine.model.layers[1].mlp.load_state_dict(engine.model.layers[2].mlp.state_dict())


def wrong_row(engine):
    """Change the row of one token, which the wrong engine then samples."""
    engine.lm_head.weight[7] *= -1


def probe(actor, engine, faulty, g):
    """Return gaps [T] and engines [T] if the first `faulty` of the 64 engines have the weights of `engine`."""
    prompts = torch.randint(0, VOCAB, (ENGINES * PROMPTS * SIBLINGS, TOKENS), generator=g)
    engines = torch.arange(ENGINES).repeat_interleave(PROMPTS * SIBLINGS)
    log_probs = []
    tokens = prompts
    with torch.no_grad():
        for _token in range(TOKENS):
            good, bad = (network(tokens).logits[:, -1].float().log_softmax(-1) for network in (actor, engine))
            sampled_from = torch.where((engines < faulty)[:, None], bad, good)
            token = torch.multinomial(sampled_from.exp(), 1, generator=g)
            log_probs.append(sampled_from.gather(1, token))
            tokens = torch.cat([tokens, token], 1)
        scored = actor(tokens).logits[:, TOKENS - 1 : -1].float().log_softmax(-1)
    actor_log_probs = scored.gather(2, tokens[:, TOKENS:, None])[..., 0]
    gaps = (actor_log_probs - torch.cat(log_probs, 1)).abs()
    return gaps.flatten(), engines[:, None].expand_as(gaps).flatten()


@pytest.mark.parametrize(
    ("fault", "faulty"),
    [
        pytest.param(None, 0, id="healthy"),
        pytest.param(wrong_layer, 1, id="one wrong layer in one engine"),
        pytest.param(wrong_row, ENGINES, id="one wrong vocabulary row"),
    ],
)
def test_planted_faults_are_found(model, fault, faulty):
    actor = copy.deepcopy(model).bfloat16()
    engine = copy.deepcopy(model)
    if fault:
        with torch.no_grad():
            fault(engine)
    gap = gap_statistics(*probe(actor, engine.bfloat16(), faulty, torch.Generator().manual_seed(11)))
    assert gap.exceeds(LIMIT) == (fault is not None), gap


def test_statistics_are_per_engine_and_nan_is_a_gap():
    """Engine 3 is wrong by 0.4 everywhere; the 63 others are exact."""
    engines = torch.arange(64).repeat_interleave(64)
    gaps = torch.where(engines == 3, 0.4, 0.0)
    assert gap_statistics(gaps, engines) == pytest.approx((0.4, 0.4, 0.4))  # p99: 1.6% of all tokens
    assert gap_statistics(gaps * (torch.arange(4096) % 2), engines) == pytest.approx((0.2, 0.0, 0.4))  # 0.8% of them
    gaps[0] = float("nan")
    assert gap_statistics(gaps, engines).exceeds(1e9)
