"""Mixtures of experts in many layouts: logits, gradients and training steps. test_checkpoints.py resumes runs."""

from __future__ import annotations

import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from conversions import to_hf
from dist.jobs import make_worker, rows, streamed
from dist.steps import VARIANTS
from dist.world import CP, EP, PP, SEQUENCE
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_brorl.config.schema import LoraConfig, OptimConfig
from megatron_brorl.parallel.packing import Packed

EP4 = {"expert": 4}
TP_EP = SEQUENCE | EP
# Kinds of models: Qwen3-MoE with and without norm_topk_prob, and Qwen2-MoE, which has a shared expert.
NORMALIZED, UNNORMALIZED, SHARED = "qwen3_moe", "qwen3_moe_unnormalized", "qwen2_moe"
WHOLE = {"share_prompt": False}  # context parallelism needs whole sequences
REFERENCE = {"ops": "reference"}


def gradients(
    _rank: int, directory: str, parallel: dict[str, Any], options: dict[str, Any]
) -> tuple[dict[int, Tensor], dict[str, Tensor], float]:
    """Return logits [G, V] of this replica's rows, the gradient of the mean of -log p, and its norm.

    The option first_rows is the number of rows of the first replica. The last replica has the remaining rows, and
    replicas between them have none. The option routes has the experts of every row, or None.
    """
    first_rows = options.pop("first_rows", 12)
    routes = options.pop("routes")
    worker = make_worker(directory, parallel, OptimConfig(clip_grad=0.0), **options)
    prompts, responses = rows(1)
    grid = worker.grid
    ends = [0, *[first_rows] * (grid.dp_size - 1), len(prompts)]
    own_rows = range(ends[grid.dp_rank], ends[grid.dp_rank + 1])
    logits: dict[int, Tensor] = {}

    def loss(batch: Packed, head: Any) -> tuple[Tensor, None]:
        rows_of_batch = batch.split(head.logits(torch.arange(len(head.hidden))).detach())
        logits.update((own_rows[row], values) for row, values in rows_of_batch)
        return -head.log_probs()[0].sum() / sum(map(len, responses)), None

    own_routes = routes and [routes[i] for i in own_rows]
    head = worker.head(temperature=1.0)
    step, _ = worker.train(
        [prompts[i] for i in own_rows], [responses[i] for i in own_rows], loss, head, lr=0.0, routes=own_routes
    )
    for values in logits.values():
        dist.all_reduce(values, group=grid.groups.cp)  # zeros except for this rank's tokens
    with torch.no_grad():
        for p in worker.actor.parameters():
            p.copy_(p.main_grad)  # so that `streamed` returns gradients
    return logits, streamed(worker), step.grad_norm


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories of models by kind."""
    directories = {kind: tmp_path_factory.mktemp("moe") for kind in (NORMALIZED, UNNORMALIZED, SHARED)}
    for kind, directory in directories.items():
        family = "qwen2_moe" if kind == SHARED else "qwen3_moe"
        tiny.make_model(directory, family, tied=False, norm_topk_prob=kind == NORMALIZED)
    return {kind: str(directory) for kind, directory in directories.items()}


@pytest.fixture(scope="module")
def expected(models, tmp_path_factory):
    """Return a function that computes logits and the gradient of the mean of -log p of a model by transformers."""

    def compute(kind, replayed):
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
        return [x.detach() for x in logits], tiny.weights(target)

    return cache(compute)


def given_experts():
    """Return random experts of all tokens of the rows, [prompt + G - 1, layers, k].

    A prompt's tokens have the same experts in two thirds of its rows, and different ones in the rows of another step.
    """
    g = torch.Generator().manual_seed(4)

    def random_experts(count):
        return torch.rand(count, 4, 8, generator=g).argsort(-1)[..., :2].to(torch.uint8)

    prompts, responses = rows(1)
    prompt_experts = {(id(prompt), step): random_experts(len(prompt)) for prompt in prompts for step in range(2)}
    return [
        torch.cat((prompt_experts[id(p), int(i % 3 == 1)], random_experts(len(r) - 1)))
        for i, (p, r) in enumerate(zip(prompts, responses, strict=True))
    ]


def choose(gate, experts, hidden):
    """Return logits, weights of the given experts [tokens, k] and the experts, as a router of transformers does."""
    logits = torch.nn.functional.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
    weights = logits.softmax(-1).gather(-1, experts)
    return logits, weights / weights.sum(-1, keepdim=True) if gate.norm_topk_prob else weights, experts


# Ranks, layout, options, kind of the model, and whether the experts are given.
GRADIENTS = [
    (1, {}, {}, NORMALIZED, False),
    (1, {}, REFERENCE | {"tokens": 60}, UNNORMALIZED, False),
    (1, {}, {**WHOLE, "tokens": 60, "recompute": True}, NORMALIZED, True),
    (1, {}, REFERENCE | {"recompute": True}, SHARED, False),
    (2, EP, {"first_rows": 7, "tokens": 60}, UNNORMALIZED, False),  # different numbers of micro-batches
    (2, EP, {"first_rows": 24, "overlap": True}, NORMALIZED, False),  # no rows on one rank
    (2, PP, {"tokens": 60}, NORMALIZED, True),
    (2, TP_EP, {}, SHARED, False),
    (2, TP_EP, REFERENCE | {"tokens": 60, "recompute": True}, SHARED, True),
    (2, CP | EP, WHOLE | {"tokens": 60}, NORMALIZED, True),
    (4, CP | EP, WHOLE, NORMALIZED, False),  # each expert on two ranks
    (4, EP, {"first_rows": 3, "tokens": 60}, NORMALIZED, False),  # no rows on two ranks
    (4, PP | EP, {"recompute": True}, SHARED, False),
    (4, TP_EP | PP, {}, NORMALIZED, False),
    (4, SEQUENCE | EP4 | CP, WHOLE, NORMALIZED, True),
]


@pytest.mark.parametrize(("size", "parallel", "options", "kind", "replayed"), GRADIENTS)
def test_logits_and_gradients_equal_transformers(worlds, models, expected, size, parallel, options, kind, replayed):
    expected_logits, expected_gradients = expected(kind, replayed)
    options = options | {"routes": given_experts() if replayed else None}
    norm = torch.stack([x.norm() for x in expected_gradients.values()]).norm().item()
    compared: set[int] = set()
    for logits, gradients, own_norm in worlds(size).run("test_experts:gradients", models[kind], parallel, options):
        assert own_norm == pytest.approx(norm, rel=1e-5)
        for row, values in logits.items():
            exact = expected_logits[row]
            torch.testing.assert_close(values, exact, atol=1e-4, rtol=0)
            log_probs = [x.log_softmax(-1).gather(-1, rows(1)[1][row][:, None]) for x in (values, exact)]
            torch.testing.assert_close(*log_probs, atol=1e-5, rtol=0)  # about 20 units in the last place
        torch.testing.assert_close(gradients, expected_gradients, atol=5e-6, rtol=0)
        compared |= logits.keys()
    assert compared == set(range(len(expected_logits)))


def test_replay_removes_most_of_the_gap_to_an_engine_in_bfloat16(worlds, models):
    job = ("jobs:engine_gaps", models[NORMALIZED], {}, torch.bfloat16)
    own_experts, replayed = (worlds(1).run(*job, replay=replay)[0] for replay in (False, True))
    share = (own_experts > 0.2).float().mean()
    assert share > 0.04
    assert (replayed > 0.2).float().mean() < share / 20
    assert replayed.mean() < own_experts.mean() / 2


OVERLAPPED = {"distributed_optimizer": True, "overlap": True}
FROZEN = {"freeze_router": True}
LORA = {"lora": LoraConfig(rank=4, targets=("q_proj", "o_proj"))}
TRAINING = [
    (2, EP, {}, {"tokens": 60, "offload": True}),
    (2, EP, FROZEN, {"overlap": True}),
    (2, TP_EP, LORA, OVERLAPPED),
    (2, CP | EP, {}, OVERLAPPED | WHOLE),
    (4, EP, {}, OVERLAPPED | {"tokens": 60}),  # each expert on two ranks, which share its optimizer
    (4, PP | EP, FROZEN, OVERLAPPED | {"offload": True, "recompute": True}),
    (4, SEQUENCE | EP4, {}, {"distributed_optimizer": True, "offload": True}),
]


@pytest.fixture(scope="module")
def single(worlds, models):
    """Return (selection of trained weights, result) of two updates in a single process with the ops in plain torch."""
    options = {"tokens": 100_000} | REFERENCE | WHOLE
    before = tiny.weights(models[NORMALIZED])
    results = []
    # Selections, and patterns of the names that they do not train. "$^" matches no name.
    for selection, fixed in (({}, "$^"), (FROZEN, r"\.mlp\.gate\."), (LORA, r"(?<!q_proj|o_proj)\.weight$")):
        (result,) = worlds(1).run("jobs:train_steps", models[NORMALIZED], {}, options | selection)
        unchanged = {name for name, x in result[1].items() if torch.equal(x, before[name])}
        assert unchanged == set(filter(re.compile(fixed).search, before))
        results.append((selection, result))
    return results


@pytest.mark.parametrize(("size", "parallel", "trained", "options"), TRAINING)
def test_training_steps_equal_those_of_a_single_process(worlds, models, single, size, parallel, trained, options):
    expected_metrics, expected_weights = next(result for selection, result in single if selection == trained)
    for metrics, weights in worlds(size).run("jobs:train_steps", models[NORMALIZED], parallel, options | trained):
        for row, expected_row in zip(metrics, expected_metrics, strict=True):
            for key in ("loss", "grad_norm", "entropy"):
                assert row[key] == pytest.approx(expected_row[key], rel=1e-5, abs=1e-6)
        torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=0)


def test_a_checkpoint_with_frozen_routers_becomes_a_hugging_face_directory(worlds, models, tmp_path):
    changes = VARIANTS["reward_kl"] | {"rollout": {"n": 8, "replay_routes": "never"}, "train": FROZEN}
    ((_, expected, *_), _) = worlds(2).run(
        "steps:resumed", models[NORMALIZED], EP, changes, steps=2, stop_at=2, root=str(tmp_path)
    )
    to_hf(tmp_path / "checkpoints" / "step_00000002", tmp_path / "back", Path(models[NORMALIZED]))
    converted = tiny.weights(tmp_path / "back")
    torch.testing.assert_close(converted, expected, atol=0, rtol=0)
    before = tiny.weights(models[NORMALIZED])
    unchanged = {name for name in before if torch.equal(converted[name], before[name])}
    assert unchanged == {name for name in before if ".gate." in name}
