"""Prediction against measurement: correlations by numpy, intervals by hand and by how often they hold the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_brorl.theory.agreement import agreement, agreement_lines, correlation, fisher_interval


def test_correlation_is_numpy_s():
    rng = np.random.default_rng(0)
    for n in (3, 10, 100):
        x, y = rng.normal(size=(2, n))
        assert correlation(x, y) == pytest.approx(np.corrcoef(x, y)[0, 1], rel=1e-12)
    assert math.isnan(correlation(np.ones(5), rng.normal(size=5)))
    assert math.isnan(correlation(np.arange(2.0), np.arange(2.0)))


def test_interval_by_hand():
    """artanh 0.5 = 0.549306 and 1.959964 / sqrt(25) = 0.391993."""
    found = fisher_interval(0.5, 28)
    assert found is not None
    assert (found.mean, found.low, found.high) == pytest.approx((0.5, 0.156019, 0.735818), abs=1e-5)
    assert all(fisher_interval(*case) is None for case in ((math.nan, 30), (0.5, 3), (1.0, 30)))


def test_interval_holds_the_truth():
    """Of 2,000 samples of 30 normal pairs with correlation 0.6, 95% give or take 1.5."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(2000, 30))
    y = 0.6 * x + 0.8 * rng.normal(size=(2000, 30))
    found = [fisher_interval(correlation(a, b), 30) for a, b in zip(x, y, strict=True)]
    assert np.mean([f.low <= 0.6 <= f.high for f in found]) == pytest.approx(0.95, abs=0.015)


def test_agreement_from_a_record():
    predicted, measured, within = [1.0, 3.0, -2.0, 5.0, 4.0], [0.2, 0.1, 0.3, 0.4, -0.1], [0.5, None, 0.1, 0.3, 0.7]
    rows = [{"step": 0, "theory_predicted/theorem": 9.0}]  # not measured
    rows += [
        {"theory_predicted/theorem": p, "theory_measured/change": m, "theory_measured/over_prompts_theorem": w}
        for p, m, w in zip(predicted, measured, within, strict=True)
    ]
    found = agreement(rows)
    assert found is not None
    assert (found["steps"], found["change"]) == (5, pytest.approx(0.18))
    assert list(found["predictions"]) == ["theorem"]
    theorem = found["predictions"]["theorem"]
    assert theorem["over_steps"]["mean"] == pytest.approx(np.corrcoef(predicted, measured)[0, 1])
    assert theorem["over_prompts"]["mean"] == pytest.approx(0.4)
    assert 0.1 <= theorem["over_prompts"]["low"] < 0.4 < theorem["over_prompts"]["high"] <= 0.7
    assert theorem["same_sign"] == 3 / 5
    first, second = agreement_lines(found)
    assert "mean over 5 steps: +0.1800" in first
    assert second.startswith("predicted by theorem: correlation over steps ")
    assert agreement(rows[:1]) is None
    assert "unknown" in agreement_lines(agreement(rows[:3]))[1]
