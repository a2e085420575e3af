"""One model in all layouts: logits against transformers, exact round trips, equal training steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from dist.jobs import rows
from dist.world import World, pairs
from ops.linear_cases import EVERYTHING, OTHER_LOSSES, SETTINGS, assert_agree, make
from transformers import AutoModelForCausalLM

from megatron_brorl.ops.reference import linear as reference

LAYOUTS = [
    (1, {}),
    (2, {"tensor": 2}),
    (2, {"tensor": 2, "sequence": True}),
    (2, {"pipeline": 2}),
    (4, {"tensor": 2, "pipeline": 2}),
]
EP2, EP4, TP_EP = {"expert": 2}, {"expert": 4}, {"tensor": 2, "sequence": True, "expert": 2}
MIXTURES = [("qwen3_moe", False), ("qwen2_moe", False)]
CONTEXTS = [
    (2, {"context": 2}),
    (4, {"context": 2, "pipeline": 2}),
    (4, {"context": 2, "tensor": 2, "sequence": True}),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directory and transformers model of every family, tied and untied."""
    made = {}
    for family, tied in (*tiny.CASES, *MIXTURES):
        directory = tmp_path_factory.mktemp(f"{family}-{tied}")
        made[family, tied] = (str(directory), tiny.make_model(directory, family, tied))
    return made


@pytest.mark.parametrize(("size", "parallel", "case"), pairs([*LAYOUTS, *CONTEXTS], tiny.CASES))
def test_logits_and_log_probs_equal_transformers(worlds, models, size, parallel, case):
    directory, model = models[case]
    results = worlds(size).run("jobs:log_probs", directory, parallel, 0.7)
    prompts, responses = rows(1)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        with torch.no_grad():
            logits = model(torch.cat((prompt, response))[None]).logits[0, len(prompt) - 1 : -1]
        expected = (logits / 0.7).log_softmax(-1).gather(-1, response[:, None]).squeeze(-1)
        for log_probs, _ in results:
            torch.testing.assert_close(log_probs[row], expected, atol=1e-4, rtol=0)
        last_stage = [found[row] for _, found in results if found]
        assert len(last_stage) == size // parallel.get("pipeline", 1)
        for found in last_stage:
            torch.testing.assert_close(found, logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("size", "parallel", "case"),
    [*pairs(LAYOUTS, tiny.CASES), *pairs([(1, {}), (2, EP2), (4, EP4)], MIXTURES[:1]), (2, TP_EP, MIXTURES[1])],
)
def test_round_trip_is_bit_exact(worlds, models, tmp_path, size, parallel, case):
    directory, model = models[case]
    target = tmp_path / "out"
    results = worlds(size).run("jobs:export", directory, parallel, str(target))
    for found in (*results, tiny.weights(target)):
        torch.testing.assert_close(found, tiny.weights(directory), atol=0, rtol=0)
    loaded = AutoModelForCausalLM.from_pretrained(target)
    assert type(loaded) is type(model)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), atol=0, rtol=0)
    assert loaded.config.rope_parameters == model.config.rope_parameters
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


# Terms of the loss in addition to the default ones.
FULL = {"dual_clip": 5.5, "entropy_coef": 0.1, "aggregation": "fixed", "aggregation_tokens": 20}
SEQUENCE = {"ratio": "sequence", "aggregation": "sequence_mean"}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
OVERLAPPED = {"distributed_optimizer": True, "overlap": True}
TRAINING = [
    (2, {"tensor": 2}, {}),
    (2, {"tensor": 2, "sequence": True}, {}),
    (2, {"pipeline": 2}, {}),
    (4, {"tensor": 2, "pipeline": 2}, {}),
    (2, {}, {}),
    (4, {"tensor": 2}, {}),
    (4, {"pipeline": 2}, {"recompute": True}),
    (1, {}, {"tokens": 1}),  # one row per micro-batch
    (1, {}, {}),
    (1, {}, {"share_prompt": False}),
    (4, {"tensor": 2, "pipeline": 2}, {"share_prompt": False}),
    (4, {"tensor": 2, "pipeline": 2, "sequence": True}, {"recompute": True, "tokens": 60}),
    (2, {"pipeline": 2}, {"fields": SELECTIVE}),
    (2, {}, {"overlap": True, "tokens": 60}),
    (4, {"tensor": 2}, {"offload": True, "overlap": True, "fields": SELECTIVE}),
    (2, {}, {"distributed_optimizer": True}),
    (4, {"pipeline": 2}, {"distributed_optimizer": True, "overlap": True, "tokens": 60}),
    (2, {}, OVERLAPPED),
    (4, {"tensor": 2}, {**OVERLAPPED, "ops": "reference", "offload": True}),
    (2, {"tensor": 2}, {"ops": "reference"}),
    (2, {"pipeline": 2}, {"ops": "reference"}),
    (4, {"tensor": 2, "pipeline": 2}, {"algo": FULL}),
    (2, {}, {"algo": FULL, "ops": "reference"}),
    (2, {"tensor": 2}, {"algo": SEQUENCE}),
    (2, {"pipeline": 2}, {"algo": SEQUENCE, "ops": "reference"}),
    *((size, parallel, {"share_prompt": False}) for size, parallel in CONTEXTS),
    (4, {"context": 2}, {"share_prompt": False, "algo": FULL, "tokens": 30}),  # two replicas of two ranks
    (2, {"context": 2}, {"share_prompt": False, "recompute": True, "ops": "reference", "overlap": True}),
]


TRAINED = [
    # Layouts with additional options are slow, the plain ones are not.
    *(
        pytest.param(*pair, marks=pytest.mark.slow if pair[2] else ())
        for pair in pairs(TRAINING, [("qwen2", True), ("qwen3", False)])
    ),
    # The other cases run once, in the layout with the most divisions.
    *(
        (4, {"tensor": 2, "pipeline": 2, "sequence": True}, {}, (family, True))
        for family in tiny.FAMILIES
        if family not in ("qwen2", "qwen3")
    ),
]


@pytest.fixture(scope="module")
def single(worlds, models):
    """Two updates in a single process: one micro-batch, no shared prompts, the ops in plain torch."""
    found: dict[str, Any] = {}

    def get(case, algo):
        key = f"{case} {algo}"
        if key not in found:
            options = {"tokens": 100_000, "ops": "reference", "share_prompt": False, "algo": algo}
            found[key] = worlds(1).run("jobs:train_steps", models[case][0], {}, options)[0]
        return found[key]

    return get


@pytest.mark.parametrize(("size", "parallel", "options", "case"), TRAINED)
def test_training_step_equals_single_process(worlds, models, single, size, parallel, options, case):
    """Loss, gradient norm and updated weights of two clipped AdamW steps, within 1e-5 relative."""
    expected_metrics, expected = single(case, options.get("algo", {}))
    assert expected_metrics[0]["grad_norm"] > 0.5  # clipping is active
    for metrics, weights in worlds(size).run("jobs:train_steps", models[case][0], parallel, options):
        for got, want in zip(metrics, expected_metrics, strict=True):
            for key in ("loss", "grad_norm", "entropy", "approx_kl", "logprob_gap_mean"):
                assert got[key] == pytest.approx(want[key], rel=1e-5)
            for key in ("clipped_low", "clipped_high", "trained_tokens", "updates", "updates_skipped"):
                assert got[key] == want[key]
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            distance = (weights[name] - value).norm() / value.norm()
            assert distance <= 1e-5, f"{name}: {distance}"


def test_pipeline_stages_exchange_activations_only(worlds, models):
    """The receiver knows the shapes of all micro-batches, which differ in length."""
    first, last = worlds(2).run("jobs:pipeline_messages", models["qwen2", True][0], {"pipeline": 2})
    assert (first["isend"], last["isend"]) == (last["irecv"], first["irecv"])
    assert first["isend"] == last["isend"]  # gradients have the shapes of the activations
    hidden = tiny.weights(models["qwen2", True][0])["model.norm.weight"].shape[0]
    assert {(dtype, shape[1:]) for dtype, shape in first["isend"]} == {(torch.float32, (1, hidden))}
    assert len({shape[0] for _, shape in first["isend"]}) > 1


# Every rank has an engine; two data-parallel copies of the actor serve twice as many.
ENGINES = [*LAYOUTS, (2, {}), (4, {"tensor": 2}), (4, {"pipeline": 2})]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "parallel", "case"),
    [
        *pairs(ENGINES, [("qwen2", True)]),
        *pairs([(1, {}), (4, {"tensor": 2, "pipeline": 2})], [(f, False) for f in tiny.FAMILIES if f != "qwen2"]),
    ],
)
def test_engine_log_probs_equal_the_actor_s(worlds, models, size, parallel, case):
    assert max(worlds(size).run("jobs:engine_gap", models[case][0], parallel)) <= 1e-4


def test_engine_log_probs_of_eight_ranks(models):
    """TP2 x PP2 twice: two data-parallel copies of an actor over four ranks."""
    world = World(8)
    try:
        gaps = world.run("jobs:engine_gap", models["qwen2", True][0], {"tensor": 2, "pipeline": 2})
    finally:
        world.close()
    assert max(gaps) <= 1e-4


def test_bf16_trains_with_fp32_masters(worlds, models):
    """The first loss has a closed form: minus the token mean of the advantages."""
    directory = models["qwen2", True][0]
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


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("settings", [SETTINGS, EVERYTHING, replace(SETTINGS, ratio="sequence"), *OTHER_LOSSES])
def test_fused_loss_over_a_sharded_vocabulary(worlds, world, settings):
    """Values, metrics and gradients of 2 and 4 tensor-parallel ranks equal the float64 reference on one."""
    expected = make(150, 16, 1001, seed=7).call(reference.linear_ppo_loss, settings=settings, upstream=-1.5)
    results = worlds(world).run("jobs:fused_loss", world, 7, settings)
    weight_gradient = torch.cat([r[2] for r in results])
    assert torch.count_nonzero(weight_gradient[1001:]) == 0
    for result, grad_hidden, _ in results:
        assert_agree((result, grad_hidden, weight_gradient[:1001]), expected, 1e-5)
