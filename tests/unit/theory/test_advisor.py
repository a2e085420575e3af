"""The advisor against enumeration, simulation, hidden pilots and the published tables."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest

from megatron_brorl.cli.theory import advice_text
from megatron_brorl.errors import UserError
from megatron_brorl.report.advice import build_figure
from megatron_brorl.theory import mixture
from megatron_brorl.theory.advisor import advise, kept_share, spread
from megatron_brorl.theory.allocation import allocate
from megatron_brorl.theory.costs import UNMEASURED, Costs, generated, learning_rate_factor, rates, read_costs
from megatron_brorl.theory.log import LoggedGroup
from megatron_brorl.theory.mass_balance import expected_masses
from megatron_brorl.theory.targets import CANDIDATES, Targets


def _group(name: str, rewards, outcomes=None) -> LoggedGroup:
    outcomes = None if outcomes is None else np.asarray(outcomes, dtype=np.int64)
    return LoggedGroup(name, None, np.asarray(rewards, dtype=np.float64), outcomes, None, None, None)


def _pilot(right, n: int) -> list[LoggedGroup]:
    return [_group(str(i), np.arange(n) < c) for i, c in enumerate(right)]


def test_kept_share_is_the_share_of_subsets():
    right, n = np.array([0, 1, 3, 6, 7, 4]), np.array([7, 7, 7, 7, 7, 6])
    for wanted in range(2, 7):
        for c, size, found in zip(right, n, kept_share(right, n, wanted), strict=True):
            subsets = [sum(s) for s in itertools.combinations([1] * c + [0] * (size - c), wanted)]
            assert found == pytest.approx(np.mean([0 < s < wanted for s in subsets]), abs=1e-12)
    with pytest.raises(ValueError, match="nothing unbiased about 7"):
        kept_share(right, n, 7)


def test_variance_of_the_group_baseline_by_simulation():
    """Independent rewards and standard normal scores: Var of N/(N-1) mean((R - mean R) g) is s (1 - s) / (N - 1)."""
    rng = np.random.default_rng(0)
    for n, s in ((4, 0.3), (16, 0.7), (64, 0.05)):
        rewards = (rng.random((200_000, n)) < s).astype(float)
        x = (rng.normal(size=rewards.shape) * (rewards - rewards.mean(1, keepdims=True))).sum(1) / (n - 1)
        assert abs(x.var() - s * (1 - s) / (n - 1)) < 3 * np.square(x).std() / np.sqrt(len(x))
        c = rng.binomial(n, s, size=200_000)
        y = spread(c, np.full(len(c), n))
        assert abs(y.mean() - s * (1 - s)) < 3 * y.std() / np.sqrt(len(y))


PILOTS = {
    "beta": lambda rng, count: rng.beta(0.4, 0.6, size=count),
    "unsolvable": lambda rng, count: np.where(rng.random(count) < 0.3, 0.0, rng.beta(0.6, 0.5, size=count)),
    "rare": lambda rng, count: 10 ** rng.uniform(-3.5, 0, size=count),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", PILOTS)
def test_kept_share_of_512_from_16(shape):
    """A pilot of 512 rollouts is cut to 16 at random, over bootstrap samples of its prompts."""
    rng = np.random.default_rng(list(PILOTS).index(shape))
    pilot = rng.binomial(512, PILOTS[shape](rng, 100))
    hits = 0
    for seed in range(20):
        whole = rng.choice(pilot, size=len(pilot))
        truth = np.mean((whole > 0) & (whole < 512))
        cut = rng.hypergeometric(whole, 512 - whole, 16)
        advice = advise(_pilot(cut, 16), 1.0, UNMEASURED, 100, 60, seed, candidates=(16, 512))
        at16, at512 = advice.candidates
        assert (at16.kept_known, at512.kept_known) == ("unbiased", "extrapolated")
        assert at16.kept.mean == pytest.approx(np.mean((cut > 0) & (cut < 16)), abs=1e-12)
        hits += at512.kept.low <= truth <= at512.kept.high
    assert hits >= 18


def test_a_fit_finds_a_distribution_that_the_counts_determine():
    """Two kinds of prompts, success rates 0.2 and 0.6 of a grid, seen 200 times each: mean and spread come back."""
    like = mixture.likelihood(np.arange(201), np.full(201, 200))
    truth = np.zeros(len(mixture.GRID))
    truth[np.searchsorted(mixture.GRID, 0.2)], truth[np.searchsorted(mixture.GRID, 0.6)] = 0.3, 0.7
    logs = np.array([math.lgamma(201) - math.lgamma(c + 1) - math.lgamma(201 - c) for c in range(201)])
    with np.errstate(divide="ignore", invalid="ignore"):
        exact = np.exp(
            logs[:, None]
            + np.arange(201)[:, None] * np.log(mixture.GRID)
            + (200 - np.arange(201))[:, None] * np.log1p(-mixture.GRID)
        )
    frequency = 1e6 * np.nan_to_num(exact) @ truth
    weights = mixture.fit(like, frequency[None], iterations=3000)[0]
    for moment in (1, 2, 3):
        assert weights @ mixture.GRID**moment == pytest.approx(truth @ mixture.GRID**moment, rel=2e-3)


def test_the_range_of_what_counts_do_not_decide():
    """One rollout per prompt fixes the mean f only; E[1 - s^2 - (1 - s)^2] can be anything from 0 to 2 f (1 - f)."""
    like = mixture.likelihood(np.array([0, 1]), np.array([1, 1]))
    frequency = np.array([7000.0, 3000.0])
    values = 1 - mixture.GRID**2 - (1 - mixture.GRID) ** 2
    low, high = mixture.profile(like, frequency, values, mixture.fit(like, frequency[None])[0])
    assert low == pytest.approx(0, abs=0.003)
    f = 0.3 + 1.96 * math.sqrt(0.3 * 0.7 / 10_000)  # the likelihood leaves f its usual interval
    assert high == pytest.approx(2 * f * (1 - f), abs=0.003)


@pytest.mark.parametrize(("prompts", "n"), [(2, 6), (50, 6)])
def test_the_range_where_every_prompt_is_alike(prompts, n):
    """All have n / 2 of n right: a share of exp(-CUT / prompts) must be solvable, and what is left may not be."""
    like, frequency = mixture.likelihood(np.array([n // 2]), np.array([n])), np.array([float(prompts)])
    values = (mixture.GRID > 0).astype(float)
    low, high = mixture.profile(like, frequency, values, mixture.fit(like, frequency[None])[0])
    assert low == pytest.approx(math.exp(-mixture.CUT / prompts), rel=0.01)
    assert high == pytest.approx(1, abs=1e-3)


@pytest.mark.slow
def test_coupling_bounds_hold_the_truth():
    """Outcomes of known distributions: a ratio of estimates up to n - 3, and beyond it between the two bounds."""
    rng = np.random.default_rng(1)
    policies = []
    for _ in range(60):
        p = 1 / np.arange(1, 80) ** rng.uniform(0.7, 1.5)
        policies.append((p / p.sum(), rng.random(79) < 0.4))
    candidates = (8, 32, 64, 256)

    def true(n: int) -> float:
        e = [expected_masses(p, right, n) for p, right in policies]
        return float(np.mean([x.q_pos * x.u_neg2 + x.q_neg * x.u_pos2 for x in e]))

    inside, first = np.zeros(4), []
    for seed in range(20):
        groups = []
        for i, (p, right) in enumerate(policies):
            x = rng.choice(len(p), size=64, p=p)
            groups.append(_group(str(i), right[x], x))
        advice = advise(groups, 1.0, UNMEASURED, 10, 60, seed, candidates=candidates)
        assert [c.coupling_known for c in advice.candidates] == ["ratio", "ratio", "bound", "bound"]
        shares = [c.coupling for c in advice.candidates]
        first.append(shares[0].mean)
        for i, n in enumerate(candidates):
            inside[i] += shares[i].low <= true(n) / true(0) <= shares[i].high
    assert (inside >= 18).all(), inside
    assert np.mean(first) == pytest.approx(true(8) / true(0), abs=0.01)


def test_the_recommendation_is_the_smallest_n_that_meets_the_targets():
    right = np.random.default_rng(2).binomial(1024, np.random.default_rng(3).beta(0.3, 0.6, size=80))
    costs = Costs(prefill=3.0, decode=0.1, train=0.2, fixed=1.0)
    targets = Targets(kept=0.9, efficiency=0.8)
    advice = advise(_pilot(right, 1024), 1.0, costs, 50, 50, 0, targets)
    kept = [np.mean(kept_share(right, np.full(80, 1024), n)) for n in CANDIDATES]
    speed = np.array([(n - 1) / (3 + n * (0.1 + 0.2 * k)) for n, k in zip(CANDIDATES, kept, strict=True)])
    good = (np.array(kept) >= 0.9 * kept[-1]) & (speed >= 0.8 * speed.max())
    assert advice.recommended == CANDIDATES[int(np.argmax(good))]
    assert advice.recommended_low <= advice.recommended <= advice.recommended_high
    for c, share, fast in zip(advice.candidates, kept, speed / speed.max(), strict=True):
        assert c.kept.mean == pytest.approx(share, rel=1e-12)
        assert c.efficiency == pytest.approx(fast, rel=1e-12)
        assert c.seconds.mean == pytest.approx(1 + 50 / share * (3 + 0.1 * c.n) + 50 * c.n * 0.2, rel=1e-12)
        assert c.seconds.low <= c.seconds.mean <= c.seconds.high
        assert c.variance.mean == pytest.approx(np.mean(spread(right, np.full(80, 1024))) / (c.n - 1), rel=1e-12)
        assert c.coupling is None
    nothing = advise(_pilot(right, 1024), 1.0, costs, 50, 50, 0, Targets(efficiency=1.01))
    assert nothing.recommended is None


def test_the_coupling_is_called_what_it_is():
    """A ratio, which few rollouts bias; unknown, and no target that is met, where no answer came twice."""
    p, right = np.array([0.4, 0.2, 0.1, 0.1, 0.1, 0.1]), np.array([True, False, False, True, False, True])
    rng, found = np.random.default_rng(7), []
    for _ in range(400):
        x = rng.choice(len(p), size=(2, 6), p=p)
        pilot = [_group(str(i), right[row], row) for i, row in enumerate(x)]
        if any(g.rewards.any() for g in pilot):
            (c,) = advise(pilot, 1.0, UNMEASURED, 1, 20, candidates=(3,)).candidates
            found += [c.coupling.mean] if c.coupling else []
    e = [expected_masses(p, right, n) for n in (3, 0)]
    true = [x.q_pos * x.u_neg2 + x.q_neg * x.u_pos2 for x in e]
    error = np.mean(found) - true[0] / true[1]
    assert abs(error) > 4 * np.std(found) / np.sqrt(len(found))  # 2 prompts, 6 rollouts: far from unbiased

    def text(outcomes):
        groups = [_group(str(i), np.arange(8) % 2 == 0, outcomes + 10 * i) for i in range(5)]
        advice = advise(groups, 1.0, UNMEASURED, 5, 20, candidates=(4, 8))
        return advice_text(advice, Targets(), UNMEASURED, 5).splitlines()

    known, unknown = text(np.array([0, 1, 0, 1, 2, 3, 4, 5])), text(np.arange(8))
    assert [line.count("/") for line in known[2:4]] == [1, 0]  # N = 8 is beyond 8 - 3 draws: a bound
    assert "/ a ratio of two unbiased estimates, not unbiased itself: few prompts or rollouts bias it" in known
    assert all("unknown" in line and "coupling" not in line for line in unknown[2:4])
    assert any(line.startswith("unknown: no answers in the log") for line in unknown)


def test_prompts_are_resampled_with_all_their_groups():
    """Two prompts, three groups: every bootstrap mean is that of all groups of the prompts drawn."""
    groups = [_group("a", [1, 0]), _group("a", [1, 0]), _group("b", [0, 0])]
    kept = advise(groups, 1.0, UNMEASURED, 1, 400, 0, candidates=(2,)).candidates[0].kept
    assert kept.mean == pytest.approx(2 / 3)
    assert (kept.low, kept.high) == (0.0, 1.0)  # b b and a a, a quarter of the samples each


@pytest.mark.parametrize(
    ("steps", "prompts", "n", "samples", "hours", "kept", "per_second", "minutes"),
    [
        (225, 512, 16, 4.390e6, 56.3, 0.420, 21.7, 15.0),
        (535, 512, 16, 10.439e6, 133.8, 0.420, 21.7, 15.0),
        (107, 128, 512, 11.226e6, 98.1, 0.625, 31.8, 55.0),
        (134, 128, 512, 14.059e6, 122.8, 0.625, 31.8, 55.0),
        (191, 128, 512, 20.039e6, 173.8, 0.625, 32.0, 54.6),
    ],
)
def test_the_published_table(steps, prompts, n, samples, hours, kept, per_second, minutes):
    """BroRL's Table 1: steps, samples and hours imply the pass rates of its Table 2 (41% and 62%) to a point."""
    found = rates(steps, prompts, n, samples, hours * 3600)
    assert found.kept_share == pytest.approx(kept, abs=0.001)
    assert found.generated_per_second == pytest.approx(per_second, abs=0.1)
    assert found.seconds_per_step / 60 == pytest.approx(minutes, abs=0.1)
    assert steps * generated(prompts, n, kept) == pytest.approx(samples, rel=2e-3)
    # The step's cost at that kept share, if all of its time is counted per generated rollout.
    cost = Costs(prefill=0, decode=1 / found.generated_per_second, train=0)
    assert cost.step(prompts, n, found.kept_share) == pytest.approx(found.seconds_per_step, rel=1e-12)


def test_the_published_gain_and_learning_rate():
    prorl, brorl = rates(225, 512, 16, 4.390e6, 56.3 * 3600), rates(107, 128, 512, 11.226e6, 98.1 * 3600)
    assert brorl.generated_per_second / prorl.generated_per_second == pytest.approx(1.47, abs=0.005)
    assert brorl.kept_per_second / prorl.kept_per_second == pytest.approx(2.2, abs=0.03)
    assert learning_rate_factor(128 * 512, 512 * 16) == pytest.approx(math.sqrt(8))


def _run(path, n: int, prefill: float, decode: float, train: float):
    path.mkdir()
    rows = []
    for step, kept in enumerate((0.5, 0.75, 0.25)):
        seconds = {"generate": 10 * (prefill + n * decode) - 0.5, "score": 0.5, "train": 10 * n * kept * train}
        seconds |= {"refit": 0.3, "step": sum(seconds.values()) + 0.4}
        rows.append(json.dumps({"step": step, "rollouts": 10 * n, "kept_share": kept, "time": seconds}))
    (path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    (path / "summary.json").write_text(json.dumps({"rollouts_per_prompt": n}))
    return path


def test_costs_of_two_runs_separate_prompts_from_rollouts(tmp_path):
    costs, how = read_costs([_run(tmp_path / "a", 16, 0.8, 0.05, 0.1), _run(tmp_path / "b", 256, 0.8, 0.05, 0.1)])
    assert (costs.prefill, costs.decode, costs.train, costs.fixed) == pytest.approx((0.8, 0.05, 0.1, 0.4), rel=1e-9)
    assert "separated" in how
    alone, how = read_costs([tmp_path / "a"])
    assert (alone.prefill, alone.decode) == (0.0, pytest.approx(0.8 / 16 + 0.05))
    assert "one N" in how
    (tmp_path / "a" / "summary.json").unlink()
    with pytest.raises(UserError, match=r"summary\.json: cannot be read"):
        read_costs([tmp_path / "a"])


@pytest.mark.parametrize("objective", ["kept", "variance"])
def test_allocation_is_the_best_of_all(objective):
    """Every allocation of five prompts over four levels: none within the tokens used is better."""
    rng = np.random.default_rng(4)
    posterior = rng.dirichlet(np.full(len(mixture.GRID), 0.05), size=5)
    tokens, levels = rng.uniform(50, 400, size=5), np.array([4, 8, 16, 32])
    s = mixture.GRID

    def value(i: int, n: int) -> float:
        if objective == "kept":
            return float(sum(w * (1 - x**n - (1 - x) ** n) for w, x in zip(posterior[i], s, strict=True)))
        return -float(sum(w * x * (1 - x) for w, x in zip(posterior[i], s, strict=True))) / (n - 1)

    for budget in (6_000.0, 12_000.0, 25_000.0):
        plan = allocate(posterior, tokens, budget, levels, objective)
        assert plan.tokens == pytest.approx(float(plan.rollouts @ tokens))
        assert plan.tokens <= budget
        assert plan.value == pytest.approx(sum(value(i, n) for i, n in enumerate(plan.rollouts)))
        best = max(
            sum(value(i, n) for i, n in enumerate(choice))
            for choice in itertools.product(levels, repeat=5)
            if np.dot(choice, tokens) <= plan.tokens + 1e-6
        )
        assert plan.value == pytest.approx(best, rel=1e-9)
        assert plan.uniform == max(n for n in levels if n * tokens.sum() <= budget)
        assert plan.uniform_value == pytest.approx(sum(value(i, plan.uniform) for i in range(5)))
    with pytest.raises(UserError, match="a budget of 100 tokens"):
        allocate(posterior, tokens, 100.0, levels, objective)


def test_figure_draws_the_advice():
    rng = np.random.default_rng(5)
    groups = [_group(str(i), (x := rng.integers(0, 6, size=40)) < 2, x) for i in range(12)]
    advice = advise(groups, 1.0, UNMEASURED, 12, 50)
    axes = build_figure(advice, Targets(), "s").axes
    found = advice.candidates
    assert [float(y) for y in axes[0].lines[0].get_ydata()] == [c.kept.mean for c in found]
    assert [float(x) for x in axes[0].lines[1].get_xdata()] == [2, 4, 8, 16, 32]  # full markers: up to the pilot's 40
    assert [float(y) for y in axes[1].lines[0].get_ydata()] == [c.coupling.mean for c in found]
    assert [float(y) for y in axes[3].lines[0].get_ydata()] == [c.seconds.mean for c in found]


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("right", "n"), [([4, 4], 6), ([0, 6], 6), ([0, 0, 1], 3), ([2] * 500, 2), ([511, 3], 512)])
def test_tiny_and_extreme_logs_have_finite_answers(right, n):
    advice = advise(_pilot(right, n), 1.0, UNMEASURED, 10, 20)
    for c in advice.candidates:
        assert 0 <= c.kept.low <= c.kept.mean <= c.kept.high <= 1 + 1e-9
        assert c.seconds.mean > 0
