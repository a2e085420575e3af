"""One model in all layouts: logits against transformers, exact round trips, equal training steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from dist.jobs import rows
from dist.world import CP, EP, PP, SEQUENCE, TP, World, pairs
from ops import own_algorithms
from ops.linear_cases import EVERYTHING, OTHER_LOSSES, SETTINGS, assert_agree, make
from transformers import AutoModelForCausalLM

from megatron_brorl.ops.reference import linear as reference

MIXTURES = [("qwen3_moe", False), ("qwen2_moe", False)]
QWEN2, QWEN3 = ("qwen2", True), ("qwen3", False)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directory and transformers model of every family, tied and untied."""
    model_of = {}
    for family, tied in (*tiny.CASES, *MIXTURES):
        directory = tmp_path_factory.mktemp(f"{family}-{tied}")
        model_of[family, tied] = (str(directory), tiny.make_model(directory, family, tied))
    return model_of


@pytest.mark.parametrize(
    ("size", "parallel", "case"),
    [
        *pairs([(1, {})], [*tiny.CASES, MIXTURES[0]]),
        *pairs([(2, TP), (2, SEQUENCE), (2, PP), (2, CP)], [QWEN2, QWEN3]),
        *pairs([(4, TP | PP), (4, CP | SEQUENCE)], [("llama", False), ("gemma3", True)]),
        (4, CP | PP, ("gemma3", False)),
        (2, SEQUENCE | EP, MIXTURES[1]),
    ],
)
def test_logits_and_a_round_trip_equal_transformers(worlds, models, tmp_path, size, parallel, case):
    """Logits agree within rounding, and the weights have the same bits on every rank and in the written directory."""
    directory, model = models[case]
    target = tmp_path / "out"
    results = worlds(size).run("jobs:forward_and_export", directory, parallel, temperature=0.7, target=str(target))
    prompts, responses = rows(1)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        with torch.no_grad():
            expected = model(torch.cat((prompt, response))[None]).logits[0, len(prompt) - 1 : -1]
        expected_log_probs = (expected / 0.7).log_softmax(-1).gather(-1, response[:, None]).squeeze(-1)
        for log_probs, _, _ in results:
            torch.testing.assert_close(log_probs[row], expected_log_probs, atol=1e-4, rtol=0)
        last_stage = [logits[row] for _, logits, _ in results if logits]
        assert len(last_stage) == size // parallel.get("pipeline", 1)
        for logits in last_stage:
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)

    for weights in (*(result[2] for result in results), tiny.weights(target)):
        torch.testing.assert_close(weights, tiny.weights(directory), atol=0, rtol=0)
    loaded = AutoModelForCausalLM.from_pretrained(target)
    assert type(loaded) is type(model)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), atol=0, rtol=0)
    assert loaded.config.rope_parameters == model.config.rope_parameters
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


# Terms of the loss in addition to the default ones.
FULL = {"dual_clip": 5.5, "entropy_coef": 0.1, "aggregation": "fixed", "aggregation_tokens": 20}
BY_SEQUENCE = {"ratio": "sequence", "aggregation": "sequence_mean"}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
ZERO = {"distributed_optimizer": True}
WHOLE = {"share_prompt": False}
REFERENCE = {"ops": "reference"}
# Tied and untied models alternate: the embedding and the head of a tied one are a parameter on two stages.
TRAINED = [  # ranks, layout, options, family and whether the head is tied
    (1, {}, {}, QWEN2),
    (1, {}, WHOLE, QWEN3),
    (1, {}, {"tokens": 1}, QWEN3),  # one row per micro-batch
    (2, {}, {}, QWEN3),
    (2, TP, {}, QWEN2),
    (2, PP, {}, QWEN2),
    (2, PP, {}, QWEN3),
    (2, SEQUENCE, {}, QWEN3),
    (2, TP, {"algo": BY_SEQUENCE}, QWEN3),
    (2, TP, REFERENCE, QWEN2),
    (2, PP, {"algo": BY_SEQUENCE, **REFERENCE}, QWEN3),
    (2, PP, {"fields": SELECTIVE}, QWEN2),
    (2, CP, WHOLE, QWEN3),
    (2, CP, {**WHOLE, **REFERENCE, "recompute": True, "overlap": True}, QWEN2),
    (2, {}, {"algo": FULL, **REFERENCE}, QWEN2),
    (2, {}, {"overlap": True, "tokens": 60}, QWEN2),
    (2, {}, ZERO, QWEN2),
    (2, {}, {**ZERO, "overlap": True}, QWEN3),
    (4, TP, {"offload": True, "overlap": True, "fields": SELECTIVE}, QWEN3),
    (4, TP, {**ZERO, **REFERENCE, "overlap": True, "offload": True}, QWEN2),
    (4, PP, {**ZERO, "overlap": True, "tokens": 60}, QWEN2),
    (4, PP, {"recompute": True}, QWEN3),
    (4, TP | PP, {**WHOLE, "algo": FULL}, QWEN2),
    (4, SEQUENCE | PP, {"recompute": True, "tokens": 60}, QWEN3),
    (4, SEQUENCE | PP, {}, ("llama", True)),
    (4, SEQUENCE | PP, {}, ("gemma3", True)),
    (4, CP, {**WHOLE, "algo": FULL, "tokens": 30}, QWEN2),  # two replicas of two ranks
    (4, CP | PP, WHOLE, QWEN2),
    (4, CP | SEQUENCE, WHOLE, QWEN3),
]


@pytest.fixture(scope="module")
def single(worlds, models):
    """Two updates in a single process: one micro-batch, no shared prompts, the ops in plain torch."""
    results: dict[str, Any] = {}

    def get(case, algo):
        key = f"{case} {algo}"
        if key not in results:
            options = {"tokens": 100_000, **REFERENCE, **WHOLE, "algo": algo}
            results[key] = worlds(1).run("jobs:train_steps", models[case][0], {}, options)[0]
        return results[key]

    return get


# The layouts without options run in `make test-fast`.
@pytest.mark.parametrize(
    ("size", "parallel", "options", "case"),
    [pytest.param(*case, marks=pytest.mark.slow if case[2] else ()) for case in TRAINED],
)
def test_training_step_equals_single_process(worlds, models, single, size, parallel, options, case):
    """Loss, gradient norm and updated weights of two clipped AdamW steps, within 1e-5 relative."""
    expected_metrics, expected = single(case, options.get("algo", {}))
    assert expected_metrics[0]["grad_norm"] > 0.5  # clipping is active
    for metrics, weights in worlds(size).run("jobs:train_steps", models[case][0], parallel, options):
        for row, expected_row in zip(metrics, expected_metrics, strict=True):
            for key in ("loss", "grad_norm", "entropy", "approx_kl", "logprob_gap_mean"):
                assert row[key] == pytest.approx(expected_row[key], rel=1e-5)
            for key in ("clipped_low", "clipped_high", "trained_tokens", "updates", "updates_skipped"):
                assert row[key] == expected_row[key]
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            distance = (weights[name] - value).norm() / value.norm()
            assert distance <= 1e-5, f"{name}: {distance}"


def test_pipeline_stages_exchange_activations_only(worlds, models):
    """The receiver knows the shapes of all micro-batches, which differ in length."""
    first, last = worlds(2).run("jobs:pipeline_messages", models[QWEN2][0], {"pipeline": 2})
    assert (first["isend"], last["isend"]) == (last["irecv"], first["irecv"])
    assert first["isend"] == last["isend"]  # gradients have the shapes of the activations
    hidden = tiny.weights(models[QWEN2][0])["model.norm.weight"].shape[0]
    assert {(dtype, shape[1:]) for dtype, shape in first["isend"]} == {(torch.float32, (1, hidden))}
    assert len({shape[0] for _, shape in first["isend"]}) > 1


def test_engine_log_probs_of_eight_ranks(models):
    """TP2 x PP2 twice: two data-parallel copies of an actor over four ranks."""
    world = World(8)
    try:
        gaps = world.run("jobs:engine_gap", models[QWEN2][0], {"tensor": 2, "pipeline": 2})
    finally:
        world.close()
    assert max(gaps) <= 1e-4


def test_bf16_trains_with_fp32_masters(worlds, models):
    """The first loss has a closed form: minus the token mean of the advantages."""
    directory = models[QWEN2][0]
    ((metrics, dtypes),) = worlds(1).run("jobs:bf16_step", directory)
    assert dtypes == {torch.bfloat16}
    prompts, responses = rows(2)
    assert metrics[0]["updates_skipped"] == 0
    assert metrics[0]["logprob_gap_max"] == 0.0  # the same weights and arithmetic
    assert metrics[1]["logprob_gap_max"] > 0.0  # the weights have changed
    assert metrics[0]["trained_tokens"] == sum(map(len, responses))
    advantages = torch.linspace(-1, 1, len(prompts))
    tokens = torch.tensor([len(r) for r in responses])
    assert metrics[0]["loss"] == pytest.approx(float(-(advantages * tokens).sum() / tokens.sum()), rel=1e-2)


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (4, EVERYTHING),
        *((2, loss) for loss in (SETTINGS, EVERYTHING, replace(SETTINGS, ratio="sequence"), *OTHER_LOSSES)),
        (2, replace(SETTINGS, policy_loss=f"{own_algorithms.__file__}:gspo")),  # a function of a user
    ],
)
def test_fused_loss_over_a_sharded_vocabulary(worlds, world, settings):
    """Values, metrics and gradients of 2 and 4 tensor-parallel ranks equal the float64 reference on one."""
    case = make(rows=150, width=16, vocab=1001, seed=7)
    expected = case.call(reference.linear_ppo_loss, settings=settings, upstream=-1.5)
    results = worlds(world).run("jobs:fused_loss", world, seed=7, settings=settings)
    weight_gradient = torch.cat([shard for _, _, shard in results])
    assert torch.count_nonzero(weight_gradient[1001:]) == 0
    for result, grad_hidden, _ in results:
        assert_agree((result, grad_hidden, weight_gradient[:1001]), expected, 1e-5)
