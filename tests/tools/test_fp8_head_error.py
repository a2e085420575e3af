"""The table of the FP8 head's errors: its figures against the format's definition and matrices that FP8 holds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import tiny
import torch
from ops.e4m3 import through

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import fp8_head_error as tool


@pytest.fixture(scope="module")
def cases():
    return {c.name: c for c in tool.invented(rows=48, width=192, vocab=700, seed=3)}


def table_of(hidden, weight):
    return (hidden @ weight.t()).log_softmax(-1)


def test_log_probs_and_entropies_by_the_definition(cases):
    for case in cases.values():
        found = {x.way: x for x in tool.lines(case, seed=0)}
        true = table_of(case.hidden.double(), case.weight.double())
        narrow = [x.bfloat16().double() for x in (case.hidden, case.weight)]
        for way, got in {
            "bf16": table_of(*narrow),
            "fp8": table_of(through(narrow[0], 1), through(narrow[1], 128)),
        }.items():
            error = (got - true).gather(-1, case.ids[:, None]).squeeze(-1)
            x = found[way]
            assert x.log_prob_rms == pytest.approx(float(error.square().mean().sqrt()), rel=1e-3, abs=1e-6)
            assert x.log_prob_mean == pytest.approx(float(error.mean()), rel=1e-3, abs=1e-6)
            assert x.log_prob_largest == pytest.approx(float(error.abs().max()), rel=1e-3, abs=1e-6)
            assert x.beyond_clip == float(((error.exp() < 0.8) | (error.exp() > 1.28)).double().mean())
            of = [-(t.exp() * t).sum(-1).mean() for t in (got, true)]
            assert x.entropy_mean == pytest.approx(float(of[0] - of[1]), rel=1e-3, abs=1e-6)
            assert x.entropy == pytest.approx(float(of[1]))
        assert found["fp8"].log_prob_rms > 3 * found["bf16"].log_prob_rms


def test_a_gradient_by_hand(cases):
    """d loss / d logits = -A/R (onehot - p) where nothing is clipped, here with a narrow softmax and true matrices."""
    case = cases["flat"]
    torch.manual_seed(0)
    advantages = torch.randn(48, generator=torch.Generator().manual_seed(0)).double()
    true = table_of(case.hidden.double(), case.weight.double())
    slope = -advantages[:, None] / 48 * (torch.nn.functional.one_hot(case.ids, 700) - true.exp())
    log_probs = true.gather(-1, case.ids[:, None]).squeeze(-1)
    got = tool._gradients(tool.reference.linear_ppo_loss, case, torch.float64, log_probs, advantages)
    wanted = slope @ case.weight.double(), slope.t() @ case.hidden.double()
    for a, b in zip(got, wanted, strict=True):
        assert (a - b).norm() < 1e-9 * b.norm()


def test_matrices_that_fp8_holds_have_no_error():
    g = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randint(-3, 4, (20, 130), generator=g) / 8,
        torch.randint(-3, 4, (300, 130), generator=g) / 16,
    )
    for x in tool.lines(tool.drawn("held", hidden, weight, g), seed=0):
        assert x.log_prob_largest < 1e-5
        assert x.beyond_clip == 0
        assert max(x.of_hidden, x.of_weight) < 5e-3  # the gradient itself is rounded to bfloat16
        assert x.cosine > 0.99999


def test_outliers_leave_logits_alone(cases):
    sharp, wild = cases["sharp"], cases["sharp, outliers"]
    assert (wild.hidden.abs().amax(0) > 50).sum() == 8
    assert torch.allclose(sharp.hidden @ sharp.weight.t(), wild.hidden @ wild.weight.t(), atol=1e-3)


def test_states_and_head_of_a_model_give_its_logits(tmp_path):
    model = tiny.make_model(tmp_path, "qwen3", tied=False)
    g = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, tiny.VOCAB, (1, n), generator=g) for n in (5, 9, 1)]
    case = tool.of_model(tmp_path, iter(texts), rows=8, seed=1)
    with torch.no_grad():
        wanted = torch.cat([model.eval()(ids).logits[0] for ids in texts])
    got = case.hidden @ case.weight.t()
    assert len(got) == 8
    away = (got[:, None] - wanted[None]).abs().amax(-1)  # of each from every place
    assert float(away.amin(1).max()) < 1e-4
    assert len(set(away.argmin(1).tolist())) == 8
