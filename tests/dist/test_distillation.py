"""On-policy distillation against transformers in float64: the advantages of tokens, and the expected gradient."""

from __future__ import annotations

import pytest
import tiny
import torch
from dist.ppo_jobs import OF_PROMPT, scored

LAYOUTS = [(1, {}), (2, {"tensor": 2}), (2, {"pipeline": 2}), (2, {}), (4, {"tensor": 2, "pipeline": 2})]
# Another family, shape and size, with a vocabulary that is padded differently.
TEACHER = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "head_dim": 8,
    "intermediate_size": 100,
}


def log_softmax(model, ids, temperature):
    """Return the log-probabilities of all tokens after each of ids."""
    return (model(ids[None]).logits[0] / temperature).log_softmax(-1)


def log_probs(model, prompt, response, temperature):
    rows = log_softmax(model, torch.cat((prompt, response)), temperature)[len(prompt) - 1 : -1]
    return rows.gather(-1, response[:, None])[:, 0]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Student and teacher: directories, and models of transformers in float64."""
    folders = [tmp_path_factory.mktemp(name) for name in ("student", "teacher")]
    student = tiny.make_model(folders[0], "qwen2", True).double()
    teacher = tiny.make_model(folders[1], "llama", False, 1, vocab_size=tiny.VOCAB + 8, **TEACHER).double()
    return *map(str, folders), student, teacher


@pytest.mark.parametrize("source", ["actor", "rollout"])
@pytest.mark.parametrize(("size", "parallel"), LAYOUTS)
def test_advantages_equal_a_plain_loop(worlds, models, size, parallel, source):
    """Reward advantages of the rollouts, one of them boosted, plus 0.3 times the log-ratio of each token."""
    student_folder, teacher_folder, student, teacher = models
    groups, rollouts, rewards = scored(0)
    expected = {}
    gaps = []
    for row in rollouts:
        prompt = torch.tensor(groups[row.group].prompt.token_ids)
        ids = row.rollout.token_ids
        with torch.no_grad():
            own = log_probs(student, prompt, ids, 0.9) if source == "actor" else row.rollout.log_probs
            gaps.append(own - log_probs(teacher, prompt, ids, 0.9))
        base = rewards[row.group, row.rollout.index] + 0.25 * row.right
        expected[f"{row.group}/{row.rollout.index}"] = base - 0.3 * gaps[-1]

    algo = {"distill_coef": 0.3, "correct_boost": 0.25, "old_log_probs": source}
    results = worlds(size).run("distillation_jobs:advantages", student_folder, teacher_folder, parallel, algo, 0.9)
    assert set().union(*(found for found, _ in results)) == expected.keys()
    for found, metrics in results:
        assert metrics["teacher_kl"] == pytest.approx(float(torch.cat(gaps).mean()), rel=1e-5)
        for name, mine in found.items():
            torch.testing.assert_close(mine.double(), expected[name].double(), atol=1e-5, rtol=1e-5)


def test_ids_beyond_the_vocabulary_of_the_teacher(worlds, models, tmp_path, capfd):
    """The student samples them from the padding of its vocabulary. Their rows are left out, and no others."""
    student_folder, _, _, _ = models
    tiny.make_model(tmp_path, "llama", False, 1, vocab_size=tiny.VOCAB - 1, **TEACHER)
    _, rollouts, _ = scored(0)
    fine = {f"{r.group}/{r.rollout.index}" for r in rollouts if int(r.rollout.token_ids.max()) < tiny.VOCAB - 1}
    assert 0 < len(fine) < len(OF_PROMPT)
    args = (student_folder, str(tmp_path), {}, {"distill_coef": 1.0}, 1.0)
    ((found, metrics),) = worlds(1).run("distillation_jobs:advantages", *args)
    assert found.keys() == fine
    assert metrics["nonfinite_rows"] == len(OF_PROMPT) - len(fine)


def test_the_expected_gradient_is_that_of_the_reverse_kl(worlds, tmp_path):
    """Enumerated over a vocabulary of 50 after three prefixes; autograd of 0.7 KL(student || teacher) in float64."""
    folders = [str(tmp_path / name) for name in ("student", "teacher")]
    student = tiny.make_model(tmp_path / "student", "qwen2", True, vocab_size=50).double()
    teacher = tiny.make_model(tmp_path / "teacher", "llama", False, 1, vocab_size=50, **TEACHER).double()
    prefixes = [[3, 4, 5, 49], [7], [48, 0, 20, 3, 3, 9]]
    ends = [[log_softmax(model, torch.tensor(p), 0.8)[-1] for p in prefixes] for model in (student, teacher)]
    own, other = map(torch.stack, ends)
    (0.7 * (own.exp() * (own - other.detach())).sum()).backward()

    args = (*folders, prefixes, own.detach().exp(), 0.7)
    (found,) = worlds(1).run("distillation_jobs:expected_gradient", *args)
    wanted = {name: p.grad for name, p in student.named_parameters()}
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():  # The advantages are float32.
        assert (found[name] - gradient).norm() <= 3e-6 * gradient.norm(), name
