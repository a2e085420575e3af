"""On-policy distillation on two processes, without a verifier in training."""

from __future__ import annotations

import pytest
from e2e.runs import rows, train


def test_a_student_learns_from_a_teacher_and_resumes_bit_exactly(config, init, warm, tmp_path):
    """Held-out prompts are scored by `exact`, training prompts by nothing. The first run stops after three steps."""
    files = f"data.mixture=[{{files=['{config.parent / 'train.jsonl'}'], weight=1, verifier='none'}}]"
    options = ["data.train=[]", files, f"teacher.path={warm}", "algo.distill_coef=1", "algo.dynamic_sampling=false"]
    options += ["train.offload=true", "parallel.pipeline=2", "optim.lr=3e-3", "theory.every=0"]
    train(config, init, tmp_path / "whole", *options)
    train(config, init, tmp_path / "two", *options, "train.steps=3")
    done = train(config, init, tmp_path / "two", *options)
    assert "resumed from" in done.stderr
    lines = rows(tmp_path / "whole")
    assert rows(tmp_path / "two") == lines
    kl = [row["teacher_kl"] for row in lines]
    assert kl[-1] < 0.8 * kl[0]
    assert {row["reward"] for row in lines} == {0.0}
    assert sum(row["updates"] for row in lines) == 16

    # A teacher with the student's weights differs from it by rounding.
    same = [option.replace(str(warm), str(init)) for option in options]
    train(config, init, tmp_path / "same", *same, "train.steps=1")
    assert rows(tmp_path / "same")[0]["teacher_kl"] == pytest.approx(0, abs=1e-6)
