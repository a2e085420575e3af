"""Intervals and corrections against tables, published values and analysis of variance; the rule's false positives."""

from __future__ import annotations

import math

import made_study  # noqa: F401  (tools on the path)
import numpy as np
import pytest
from study.inference import holm, mixed_model, paired_t, student_quantile

# Of any table of Student's distribution.
TABLE = [
    (0.975, 1, 12.706),
    (0.975, 2, 4.303),
    (0.975, 4, 2.776),
    (0.995, 4, 4.604),
    (0.975, 30, 2.042),
    (0.9, 9, 1.383),
]


@pytest.mark.parametrize(("p", "degrees", "expected"), TABLE)
def test_quantiles_are_those_of_the_tables(p, degrees, expected):
    assert student_quantile(p, degrees) == pytest.approx(expected, abs=5e-4)
    assert student_quantile(1 - p, degrees) == pytest.approx(-expected, abs=5e-4)


def test_quantiles_in_closed_form():
    """One degree of freedom is Cauchy's distribution; with two, t = (2p - 1) / sqrt(2 p (1 - p))."""
    for p in (0.6, 0.9, 0.975, 0.9999):
        assert student_quantile(p, 1) == pytest.approx(math.tan(math.pi * (p - 0.5)), rel=1e-9)
        assert student_quantile(p, 2) == pytest.approx((2 * p - 1) / math.sqrt(2 * p * (1 - p)), rel=1e-9)


def test_against_scipy():
    stats = pytest.importorskip("scipy.stats")
    generator = np.random.default_rng(0)
    for n in (2, 3, 5, 12):
        before, after = generator.normal(size=(2, n))
        expected = stats.ttest_rel(after, before)
        found = paired_t((after - before).tolist())
        low, high = expected.confidence_interval(0.95)
        assert (found.t, found.p) == pytest.approx((expected.statistic, expected.pvalue), rel=1e-9)
        assert (found.low, found.high) == pytest.approx((low, high), rel=1e-9)


def test_the_published_three_seeds():
    """docs/results: 12.43, 28.91 and 20.44 points over three seeds are +20.6 (+0.1 to +41.1), t = 4.33, p = 0.049."""
    found = paired_t([12.43, 28.91, 20.44])
    assert found.degrees == 2
    assert (found.mean, found.low, found.high) == pytest.approx((20.59, 0.1, 41.1), abs=0.05)
    assert (found.t, found.p) == (pytest.approx(4.33, abs=0.005), pytest.approx(0.049, abs=0.0005))


def test_differences_without_spread():
    assert (paired_t([0.0, 0.0]).t, paired_t([0.0, 0.0]).p) == (0, 1)
    same = paired_t([0.5, 0.5, 0.5])
    assert (same.low, same.high, same.t, same.p) == (0.5, 0.5, math.inf, 0)
    with pytest.raises(ValueError, match="at least two warm starts"):
        paired_t([0.5])


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def null_study(generator, warm_starts, prompts, arms):
    """Shares right of arms that do not differ: warm starts and prompts vary, runs do, samples are binomial."""
    base = generator.normal(0, 0.8, (warm_starts, 1, 1)) + generator.normal(0, 1.2, (warm_starts, 1, prompts))
    run = generator.normal(0, 0.6, (warm_starts, arms, 1))
    return generator.binomial(16, 1 / (1 + np.exp(-(base + run)))) / 16


def test_false_positives_of_the_whole_rule():
    """Where no arm differs, some comparison is called different in 5% of studies with one comparison, in no more with
    four; tests over prompts, which leave out how runs differ, call it so in most."""
    generator, studies = np.random.default_rng(1), 1500
    single = family = over_prompts = 0
    for _ in range(studies):
        shares = null_study(generator, warm_starts=5, prompts=24, arms=5)
        gaps = shares[:, 1:] - shares[:, :1]  # [warm starts, comparisons, prompts]
        p = [paired_t(gap.tolist()).p for gap in gaps.mean(axis=2).T]
        single += p[0] <= 0.05
        family += min(holm(p)) <= 0.05
        over_prompts += paired_t(gaps[:, 0].mean(axis=0).tolist()).p <= 0.05
    error = math.sqrt(0.05 * 0.95 / studies)
    assert abs(single / studies - 0.05) < 4 * error
    assert family / studies < 0.05 + 4 * error
    assert over_prompts / studies > 0.4


def test_mixed_model_of_a_balanced_study_is_its_analysis_of_variance():
    """Effects are differences of means; REML's variances are those of the mean squares where these are positive."""
    pytest.importorskip("statsmodels")
    generator, (w, a, p) = np.random.default_rng(3), (6, 3, 10)
    y = (
        np.array([0.0, 0.1, -0.2])[None, :, None]
        + generator.normal(0, 0.3, (w, 1, 1))
        + generator.normal(0, 0.15, (w, a, 1))
        + generator.normal(0, 0.25, (w, 1, p))
        + generator.normal(0, 0.1, (w, a, p))
    )
    names = ["n8", "n64", "n512"]
    rows = [
        {"share": y[i, j, k], "arm": names[j], "warm_start": i, "prompt": f"{i}:{k}"}
        for i in range(w)
        for j in range(a)
        for k in range(p)
    ]
    fit = mixed_model(rows, "n8")

    # Mean squares of a split plot: warm starts, runs in them, prompts in them, what is left.
    of_w, of_run, of_prompt, of_arm = y.mean((1, 2)), y.mean(2), y.mean(1), y.mean((0, 2))
    run = of_run - of_w[:, None] - of_arm + y.mean()
    prompt = of_prompt - of_w[:, None]
    left = y - of_run[:, :, None] - of_prompt[:, None] + of_w[:, None, None]
    ms_run = p * (run**2).sum() / ((w - 1) * (a - 1))
    ms_prompt = a * (prompt**2).sum() / (w * (p - 1))
    ms_left = (left**2).sum() / (w * (a - 1) * (p - 1))
    ms_w = a * p * ((of_w - y.mean()) ** 2).sum() / (w - 1)
    expected = {
        "warm start": (ms_w - ms_run - ms_prompt + ms_left) / (a * p),
        "run": (ms_run - ms_left) / p,
        "prompt": (ms_prompt - ms_left) / a,
        "residual": ms_left,
    }
    assert min(expected.values()) > 0
    assert fit.converged
    assert fit.variances == pytest.approx(expected, rel=2e-2)
    half = 1.959964 * math.sqrt(2 * ms_run / (w * p))
    for j, name in enumerate(names[1:], start=1):
        gap = of_arm[j] - of_arm[0]
        assert fit.effects[name].mean == pytest.approx(gap, abs=1e-6)
        assert (fit.effects[name].low, fit.effects[name].high) == pytest.approx((gap - half, gap + half), rel=2e-2)
