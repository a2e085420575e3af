"""On-policy distillation against transformers in float64: the advantages of tokens, and the expected gradient."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from dist.jobs import make_worker, share
from dist.ppo_jobs import TEMPERATURE, scored
from dist.test_ppo import distribution, log_probs
from dist.world import PP, TP

from megatron_brorl.config.schema import AlgoConfig
from megatron_brorl.models.weights import names
from megatron_brorl.models.weights.stream import make_buckets, stream
from megatron_brorl.train.experience import make_experience
from megatron_brorl.train.models import TrainingModels
from megatron_brorl.train.update import ActorLoss
from megatron_brorl.types import Prompt, PromptGroup, TrainingRollout

# Ranks, layout, source of log pi, and the difference between the vocabularies of teacher and student.
CASES = [
    (1, {}, "actor", 8),
    (2, TP, "rollout", -1),
    (2, {}, "rollout", 8),
    (4, TP | PP, "actor", -1),
]
SIZES = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 8, "head_dim": 8, "intermediate_size": 100}


def make_models(folder, vocab, teacher_vocab):
    """Return the directories of a student and of a teacher of another family and shape, and both models in float64."""
    student = tiny.make_model(folder / "student", "qwen2", tied=True, vocab_size=vocab)
    teacher = tiny.make_model(folder / "teacher", "llama", tied=False, seed=1, vocab_size=teacher_vocab, **SIZES)
    return [str(folder / "student"), str(folder / "teacher")], student.double(), teacher.double()


def advantages(
    _rank: int, folders: list[str], parallel: dict[str, Any], algo: AlgoConfig
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return the advantages of this replica's part of 24 rollouts by their ids, and metrics. folders: actor, teacher"""
    actor, teacher = (make_worker(folder, parallel, offload=True) for folder in folders)
    models = TrainingModels(actor, teacher=teacher)
    models.offload()
    assert not any(p.untyped_storage().nbytes() for p in teacher.actor.parameters())
    groups, rollouts, table = scored(step=0)
    experience, metrics = make_experience(share(rollouts, actor.grid), groups, table, models, algo, TEMPERATURE)
    return dict(zip(experience.ids, experience.advantages, strict=True)), metrics


@pytest.mark.parametrize(("size", "parallel", "source", "extra_ids"), CASES)
def test_advantages_equal_a_plain_loop(worlds, tmp_path, size, parallel, source, extra_ids):
    """Rows with an id that the teacher does not know are left out."""
    folders, student, teacher = make_models(tmp_path, tiny.VOCAB, tiny.VOCAB + extra_ids)
    groups, rollouts, rewards = scored(step=0)
    algo = AlgoConfig(distill_coef=0.3, old_log_probs=source)
    expected = {}
    gaps = []
    for row in rollouts:
        prompt, ids = torch.tensor(groups[row.group].prompt.token_ids), row.token_ids
        if int(ids.max()) >= tiny.VOCAB + extra_ids:
            continue
        student_log_probs = log_probs(student, prompt, ids) if source == "actor" else row.log_probs
        gaps.append((student_log_probs - log_probs(teacher, prompt, ids)).detach())
        reward = rewards[row.group, row.index]
        expected[f"{row.group}/{row.index}"] = reward - algo.distill_coef * gaps[-1]
    assert (len(expected) == 24) == (extra_ids > 0)  # all rows, if the teacher knows all ids

    results = worlds(size).run("test_distillation:advantages", folders, parallel, algo)
    assert set().union(*(advantages for advantages, _ in results)) == expected.keys()
    for advantages, metrics in results:
        assert metrics["teacher_kl"] == pytest.approx(float(torch.cat(gaps).mean()), rel=1e-5)
        for name, values in advantages.items():
            torch.testing.assert_close(values.double(), expected[name], atol=1e-5, rtol=1e-5)


def expected_gradient(
    _rank: int, folders: list[str], prefixes: list[list[int]], pi: torch.Tensor, algo: AlgoConfig
) -> dict[str, torch.Tensor]:
    """Return the sum over prefixes and next tokens x of pi(x) times the gradient of the loss of x, by name.

    pi: [prefixes, V], the student's probabilities.
    """
    worker, teacher = (make_worker(folder, {}, dtype=torch.float64) for folder in folders)
    groups = [PromptGroup(Prompt(str(i), "", tuple(p), None, "none"), round=0, index=i) for i, p in enumerate(prefixes)]
    slots = [(g, x) for g in range(len(prefixes)) for x in range(pi.shape[1])]
    rollouts = [TrainingRollout(g, x, torch.tensor([x]), pi[g, x, None].log().float(), right=False) for g, x in slots]
    models = TrainingModels(worker, teacher=teacher)
    experience, _ = make_experience(rollouts, groups, torch.zeros(pi.shape), models, algo, TEMPERATURE)

    loss = ActorLoss(experience, algo, pi.flatten().tolist())
    worker._run(worker.micro_batches(experience.prompts, experience.responses), loss, worker.head(TEMPERATURE))
    gradients = {name: p.grad for name, p in names.global_parameters(worker.actor).items()}
    buckets = make_buckets(names.entries(worker.shape, 1), item_bytes=8)
    return {n: x.clone() for n, x in stream(buckets, worker.shape.kv_heads, gradients, worker.grid, torch.float64)}


def test_the_expected_gradient_is_that_of_the_reverse_kl(worlds, tmp_path):
    """Autograd of 0.7 KL(student || teacher), summed over all 50 next tokens at three prefixes."""
    folders, student, teacher = make_models(tmp_path, 50, 50)
    prefixes = [[3, 4, 5, 49], [7], [48, 0, 20, 3, 3, 9]]
    token = torch.tensor([0])  # any response of one token
    log_p = torch.cat([distribution(student, torch.tensor(ids), token) for ids in prefixes])  # [prefixes, V]
    log_q = torch.cat([distribution(teacher, torch.tensor(ids), token) for ids in prefixes]).detach()
    (0.7 * (log_p.exp() * (log_p - log_q)).sum()).backward()
    algo = AlgoConfig(distill_coef=0.7, is_cap=0.0)
    (gradients,) = worlds(1).run("test_distillation:expected_gradient", folders, prefixes, log_p.detach().exp(), algo)
    expected_gradients = {name: weight.grad for name, weight in student.named_parameters()}
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():  # The advantages are float32.
        assert (gradients[name] - gradient).norm() <= 3e-6 * gradient.norm(), name
