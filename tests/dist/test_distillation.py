"""On-policy distillation against transformers in float64: the advantages of tokens, and the expected gradient."""

from __future__ import annotations

import pytest
import tiny
import torch
from dist.ppo_jobs import scored
from dist.test_ppo import distribution, log_probs
from dist.world import pairs

from megatron_brorl.config.schema import AlgoConfig

LAYOUTS = [(1, {}), (2, {"tensor": 2}), (2, {"pipeline": 2}), (2, {}), (4, {"tensor": 2, "pipeline": 2})]
# The source of log pi, and the difference between the vocabularies of teacher and student.
CASES = [("actor", 8), ("rollout", -1)]
SIZES = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 8, "head_dim": 8, "intermediate_size": 100}


def make_models(folder, vocab, teacher_vocab):
    """Return the directories of a student and of a teacher of another family and shape, and both models in float64."""
    student = tiny.make_model(folder / "student", "qwen2", True, vocab_size=vocab)
    teacher = tiny.make_model(folder / "teacher", "llama", False, 1, vocab_size=teacher_vocab, **SIZES)
    return [str(folder / "student"), str(folder / "teacher")], student.double(), teacher.double()


@pytest.mark.parametrize(("size", "parallel", "case"), pairs(LAYOUTS, CASES))
def test_advantages_equal_a_plain_loop(worlds, tmp_path, size, parallel, case):
    """Rows with an id that the teacher does not know are left out. The student samples it from its padding."""
    source, more = case
    folders, student, teacher = make_models(tmp_path, tiny.VOCAB, tiny.VOCAB + more)
    groups, rollouts, rewards = scored(0)
    expected = {}
    gaps = []
    for row in rollouts:
        prompt, ids = torch.tensor(groups[row.group].prompt.token_ids), row.token_ids
        if int(ids.max()) >= tiny.VOCAB + more:
            continue
        own = log_probs(student, prompt, ids) if source == "actor" else row.log_probs
        gaps.append((own - log_probs(teacher, prompt, ids)).detach())
        base = rewards[row.group, row.index]
        expected[f"{row.group}/{row.index}"] = base - 0.3 * gaps[-1]
    assert (len(expected) == 24) == (more > 0)

    algo = AlgoConfig(distill_coef=0.3, old_log_probs=source)
    results = worlds(size).run("distillation_jobs:advantages", folders, parallel, algo)
    assert set().union(*(found for found, _ in results)) == expected.keys()
    for found, metrics in results:
        assert metrics["teacher_kl"] == pytest.approx(float(torch.cat(gaps).mean()), rel=1e-5)
        for name, mine in found.items():
            torch.testing.assert_close(mine.double(), expected[name], atol=1e-5, rtol=1e-5)


def test_the_expected_gradient_is_that_of_the_reverse_kl(worlds, tmp_path):
    """Autograd of 0.7 KL(student || teacher), summed over all 50 next tokens at three prefixes."""
    folders, student, teacher = make_models(tmp_path, 50, 50)
    prefixes = [[3, 4, 5, 49], [7], [48, 0, 20, 3, 3, 9]]
    one = torch.tensor([0])  # a response
    own, other = (torch.cat([distribution(m, torch.tensor(p), one) for p in prefixes]) for m in (student, teacher))
    (0.7 * (own.exp() * (own - other.detach())).sum()).backward()
    algo = AlgoConfig(distill_coef=0.7, is_cap=0.0)
    (found,) = worlds(1).run("distillation_jobs:expected_gradient", folders, prefixes, own.detach().exp(), algo)
    wanted = {name: p.grad for name, p in student.named_parameters()}
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():  # The advantages are float32.
        assert (found[name] - gradient).norm() <= 3e-6 * gradient.norm(), name
