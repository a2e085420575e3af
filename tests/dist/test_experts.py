"""Mixtures of experts in many layouts: logits, gradients, training steps, and checkpoints of training."""

from __future__ import annotations

import re
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import tiny
import torch
from conversions import to_hf, weights
from dist.jobs import rows
from dist.test_distributed_optimizer import BF16, OVERLAP, ZERO
from dist.test_steps import VARIANTS, assert_bit_exact, assert_same
from transformers import AutoModelForCausalLM

from megatron_brorl.config.schema import LoraConfig

EP2, EP4 = {"expert": 2}, {"expert": 4}
TP = {"tensor": 2, "sequence": True}
SHARED = "qwen2_moe"
WHOLE = {"share_prompt": False}  # context parallelism needs whole sequences
LAYOUTS = [
    (1, {}, {}),
    (1, {}, {"ops": "reference", "tokens": 60}),
    (2, {}, {"recompute": True}),
    (2, {"pipeline": 2}, {}),
    (2, EP2, {}),
    (2, EP2, {"first": 7, "tokens": 60}),  # different numbers of micro-batches
    (2, EP2, {"first": 24, "overlap": True}),  # no rows on one rank
    (2, {**TP, **EP2}, {}),
    (2, {"context": 2, **EP2}, WHOLE),
    (4, {"context": 2, **EP2}, WHOLE),  # each expert on two ranks
    (4, EP2, {"first": 3, "tokens": 60}),  # no rows on two ranks
    (4, {"pipeline": 2, **EP2}, {"recompute": True}),
    (4, {**TP, **EP4}, {"first": 7}),
    (4, {**TP, **EP2, "pipeline": 2}, {}),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories of Qwen3-MoE by norm_topk_prob, and of Qwen2-MoE."""
    made = {kind: tmp_path_factory.mktemp("moe") for kind in (True, False, SHARED)}
    for kind, directory in made.items():
        family, normalised = (SHARED, False) if kind == SHARED else ("qwen3_moe", kind)
        tiny.make_model(directory, family, False, norm_topk_prob=normalised)
    return {kind: str(directory) for kind, directory in made.items()}


@pytest.fixture(scope="module")
def expected(models, tmp_path_factory):
    """Logits of the rows, and the gradient of the mean of -log p, by transformers, by model and replay."""
    found = {}
    for kind, replayed in product(models, (True, False)):
        model = AutoModelForCausalLM.from_pretrained(models[kind])
        logits = []
        loss = torch.zeros(())
        for prompt, response, routes in zip(*rows(1), given_experts(), strict=True):
            for i, layer in enumerate(model.model.layers if replayed else ()):
                layer.mlp.gate.forward = partial(choose, layer.mlp.gate, routes[:, i].long())
            logits.append(model(torch.cat((prompt, response[:-1]))[None]).logits[0, len(prompt) - 1 :])
            loss = loss - logits[-1].log_softmax(-1).gather(-1, response[:, None]).sum()
        (loss / sum(map(len, rows(1)[1]))).backward()

        # transformers stacks experts, and separates them when it saves a model.
        for parameter in model.parameters():
            parameter.data = parameter.grad
        target = tmp_path_factory.mktemp("gradients")
        model.save_pretrained(target)
        found[kind, replayed] = ([x.detach() for x in logits], tiny.weights(target))
    return found


def given_experts():
    """Return random experts of all tokens of the rows, [prompt + G - 1, layers, k].

    Two thirds of the rows of a prompt have the same experts of it. The others have others, as after an earlier step.
    """
    g = torch.Generator().manual_seed(4)

    def drawn(count):
        return torch.rand(count, 4, 8, generator=g).argsort(-1)[..., :2].to(torch.uint8)

    prompts, responses = rows(1)
    of_prompts = {(id(prompt), step): drawn(len(prompt)) for prompt in prompts for step in range(2)}
    return [
        torch.cat((of_prompts[id(p), int(i % 3 == 1)], drawn(len(r) - 1)))
        for i, (p, r) in enumerate(zip(prompts, responses, strict=True))
    ]


def choose(gate, experts, hidden):
    """Return logits, weights of the given experts [tokens, k] and the experts, as a router of transformers does."""
    logits = torch.nn.functional.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
    weights = logits.softmax(-1).gather(-1, experts)
    return logits, weights / weights.sum(-1, keepdim=True) if gate.norm_topk_prob else weights, experts


PLAIN_WEIGHTS = [(1, {}, {}, False, False), (2, EP2, {"tokens": 60}, False, False)]  # norm_topk_prob = false
SHARED_EXPERT = [
    (1, {}, {"ops": "reference", "recompute": True}, SHARED, False),
    (2, {**TP, **EP2}, {}, SHARED, False),
    (2, {**TP, **EP2}, {"ops": "reference"}, SHARED, True),
    (4, {"pipeline": 2, **EP2}, {"recompute": True}, SHARED, False),
]
REPLAYED = [
    (1, {}, {}, False, True),
    (1, {}, {**WHOLE, "tokens": 60, "recompute": True}, True, True),
    (2, {"pipeline": 2}, {"tokens": 60}, True, True),
    (2, EP2, {"first": 7, "tokens": 60}, True, True),
    (2, {**TP, **EP2}, {"tokens": 60, "recompute": True}, True, True),
    (2, {"context": 2, **EP2}, {**WHOLE, "tokens": 60}, True, True),
    (4, {"pipeline": 2, **EP2}, {"tokens": 60, "recompute": True}, True, True),
    (4, {**TP, **EP4, "context": 2}, WHOLE, True, True),
]


@pytest.mark.parametrize(
    ("size", "parallel", "options", "kind", "replayed"),
    [*((*case, True, False) for case in LAYOUTS), *PLAIN_WEIGHTS, *SHARED_EXPERT, *REPLAYED],
)
def test_logits_and_gradients_equal_transformers(worlds, models, expected, size, parallel, options, kind, replayed):
    logits, of_loss = expected[kind, replayed]
    options = options | {"routes": given_experts() if replayed else None}
    norm = torch.stack([x.norm() for x in of_loss.values()]).norm().item()
    seen: set[int] = set()
    for found, gradients, got in worlds(size).run("expert_jobs:gradients", models[kind], parallel, options):
        assert got == pytest.approx(norm, rel=1e-5)
        for row, values in found.items():
            torch.testing.assert_close(values, logits[row], atol=1e-4, rtol=0)
            got, want = (x.log_softmax(-1).gather(-1, rows(1)[1][row][:, None]) for x in (values, logits[row]))
            torch.testing.assert_close(got, want, atol=1e-5, rtol=0)  # about 20 units in the last place
        torch.testing.assert_close(gradients, of_loss, atol=5e-6, rtol=0)
        seen |= found.keys()
    assert seen == set(range(len(logits)))


def test_replay_removes_most_of_the_gap_to_an_engine_in_bfloat16(worlds, models):
    job = ("jobs:engine_gaps", models[True], {}, torch.bfloat16)
    without, replayed = (worlds(1).run(*job, replay)[0] for replay in (False, True))
    share = (without > 0.2).float().mean()
    assert share > 0.04
    assert (replayed > 0.2).float().mean() < share / 20
    assert replayed.mean() < without.mean() / 2


OVERLAPPED = {"distributed_optimizer": True, "overlap": True}
FROZEN = {"freeze_router": True}
LORA = {"lora": LoraConfig(rank=4, targets=("q_proj", "o_proj"))}
TRAINING = [
    (2, {}, {}, OVERLAPPED),
    (2, EP2, {}, {"tokens": 60, "offload": True}),
    (2, EP2, FROZEN, {"overlap": True}),
    (2, {**TP, **EP2}, {}, OVERLAPPED),
    (2, {**TP, **EP2}, LORA, OVERLAPPED),
    (2, {"context": 2, **EP2}, {}, {**OVERLAPPED, **WHOLE}),
    (4, EP2, {}, {**OVERLAPPED, "tokens": 60}),  # each expert on two ranks, which share its optimizer
    (4, EP2, FROZEN, {**OVERLAPPED, "offload": True}),
    (4, {"pipeline": 2, **EP2}, {}, {**OVERLAPPED, "offload": True, "recompute": True}),
    (4, {**TP, **EP4}, {}, {"distributed_optimizer": True, "offload": True}),
]


@pytest.fixture(scope="module")
def single(worlds, models):
    """Two updates in a single process with the ops in plain torch, by the trained parameters."""
    options = {"tokens": 100_000, "ops": "reference", "share_prompt": False}
    before = tiny.weights(models[True])
    found = []
    for trained, fixed in (({}, "never"), (FROZEN, r"\.mlp\.gate\."), (LORA, r"(?<!q_proj|o_proj)\.weight$")):
        result = worlds(1).run("jobs:train_steps", models[True], {}, options | trained)[0]
        assert {name for name, x in result[1].items() if torch.equal(x, before[name])} == set(
            filter(re.compile(fixed).search, before)
        )
        found.append((trained, result))
    return found


@pytest.mark.parametrize(("size", "parallel", "trained", "options"), TRAINING)
def test_training_steps_equal_those_of_a_single_process(worlds, models, single, size, parallel, trained, options):
    expected_metrics, expected_weights = next(result for key, result in single if key == trained)
    for metrics, found in worlds(size).run("jobs:train_steps", models[True], parallel, options | trained):
        for got, want in zip(metrics, expected_metrics, strict=True):
            for key in ("loss", "grad_norm", "entropy"):
                assert got[key] == pytest.approx(want[key], rel=1e-5, abs=1e-6)
        torch.testing.assert_close(found, expected_weights, atol=1e-6, rtol=0)


# The engine of the following tests records no experts.
FEW = {"rollout": {"n": 8, "replay_routes": "never"}}
CRITIC, KL = (VARIANTS[name] | FEW for name in ("critic", "reward_kl"))
TP_EP = {**TP, **EP2}


@pytest.fixture(scope="module")
def steps(worlds, models):
    """Metrics and weights of three steps in one process, by the settings that differ."""
    found = {}

    def get(changes):
        if repr(changes) not in found:
            (found[repr(changes)],) = worlds(1).run("steps:run_steps", models[True], {}, changes, 3, {})
        return found[repr(changes)]

    return get


@pytest.mark.parametrize(
    ("size", "parallel", "changes", "other_size", "other"),
    [
        (1, {}, CRITIC, 2, EP2),
        (2, EP2, CRITIC, 1, {}),
        (2, EP2, CRITIC, 4, {**TP_EP, "pipeline": 2}),
        (2, TP_EP, KL, 2, EP2),
        (2, TP_EP, FEW, 2, {"pipeline": 2}),
        (4, EP4, FEW, 2, TP_EP),
    ],
)
def test_resume_in_another_layout(worlds, models, tmp_path, steps, size, parallel, changes, other_size, other):
    metrics, expected, _ = steps(changes)
    worlds(size).run("steps:resumed", models[True], parallel, changes, 2, 2, str(tmp_path))
    got = worlds(other_size).run("steps:go_on", models[True], other, changes, 1, str(tmp_path))
    assert_same(got, (metrics[2:], expected, None))
    for _, found in got:
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("size", "parallel", "changes", "optimizer"),
    [
        (2, EP2, FEW, BF16),
        (2, EP2, CRITIC, ZERO),
        (2, TP_EP, FEW, ZERO | BF16),
        (4, EP2, CRITIC, OVERLAP),
        (4, {**EP2, "pipeline": 2}, FEW, BF16),
    ],
)
def test_resume_is_bit_exact(worlds, models, tmp_path, steps, size, parallel, changes, optimizer):
    whole = worlds(size).run("steps:run_steps", models[True], parallel, changes | optimizer, 3, {})
    cut = worlds(size).run("steps:resumed", models[True], parallel, changes | optimizer, 3, 2, str(tmp_path))
    assert_bit_exact(cut, whole)
    if "model" not in optimizer:
        assert_same(whole, steps(changes))


def test_the_distributed_optimizer_needs_the_saved_expert_size(worlds, models, tmp_path, steps):
    """Another number of replicas is allowed."""
    metrics, expected, _ = steps(FEW)
    worlds(2).run("steps:resumed", models[True], EP2, FEW | ZERO, 2, 2, str(tmp_path))
    got = worlds(4).run("steps:go_on", models[True], EP2, FEW | ZERO, 1, str(tmp_path))
    assert_same(got, (metrics[2:], expected, None))
    for refused in worlds(2).run("saving_jobs:refused", models[True], {}, FEW | ZERO, str(tmp_path)):
        assert re.search("parallel.expert = 2 and this run has .*parallel.expert = 1;", refused)


def test_a_checkpoint_with_frozen_routers_becomes_a_hugging_face_directory(worlds, models, tmp_path):
    ((_, expected), _) = worlds(2).run("steps:resumed", models[True], EP2, KL | {"train": FROZEN}, 2, 2, str(tmp_path))
    to_hf(tmp_path / "checkpoints" / "step_00000002", tmp_path / "back", Path(models[True]))
    found = weights(tmp_path / "back")
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    before = tiny.weights(models[True])
    assert {name for name in before if torch.equal(found[name], before[name])} == {n for n in before if ".gate." in n}
