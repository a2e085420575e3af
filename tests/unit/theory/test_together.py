"""Prompts and rollouts of each, together: against all whole numbers, and against the closed form."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from megatron_brorl.errors import UserError
from megatron_brorl.theory import mixture
from megatron_brorl.theory.costs import UNMEASURED, Costs
from megatron_brorl.theory.together import UNKNOWN, best, prices, read_noise, text, together

COSTS = Costs(prefill=0.7, decode=0.02, train=0.05, fixed=3.0)
RATES = np.where(np.isclose(mixture.GRID, mixture.GRID[np.abs(mixture.GRID - 0.2).argmin()]), 1.0, 0.0)  # all near 0.2
PRICE = prices(COSTS, RATES, 200)


def test_a_prompt_pays_for_training_as_often_as_it_is_kept():
    s = mixture.GRID[int(RATES.argmax())]
    for n in (2, 5, 200):
        kept = 1 - s**n - (1 - s) ** n
        assert PRICE[n - 2] == pytest.approx(0.7 + n * (0.02 + 0.05 * kept))


@pytest.mark.parametrize(("between", "within"), [(1.0, 0.5), (1.0, 30.0), (0.01, 9.0), (0.0, 2.0), (3.0, 0.0)])
@pytest.mark.parametrize("budget", [0.95, 3.3, 20.0])
def test_the_best_of_all_whole_numbers(between, within, budget):
    """Every pair that the budget buys, one by one."""
    found = {
        (prompts, n): (between + within / (n - 1)) / prompts
        for n in range(2, 201)
        for prompts in range(1, 40)
        if prompts * PRICE[n - 2] <= budget
    }
    assert len(found) > 1
    choice = best(between, within, PRICE, budget)
    assert found[choice] == pytest.approx(min(found.values()), rel=1e-12)


@pytest.mark.parametrize(("between", "within"), [(1.0, 0.5), (1.0, 30.0), (0.05, 9.0)])
def test_a_large_budget_comes_to_the_closed_form(between, within):
    """Prices that rise evenly, and so many prompts that whole numbers are no matter."""
    prompt, rollout = 0.7, 0.05
    price = prompt + rollout * np.arange(2, 500)
    _, n = best(between, within, price, 1e7)
    ideal = 1 + math.sqrt(within * (prompt + rollout) / (between * rollout))
    assert n == pytest.approx(max(2.0, ideal), abs=0.51)


def test_a_budget_below_one_prompt_is_refused():
    with pytest.raises(UserError, match=r"--budget 0\.5: one prompt with 2 rollouts costs 0\.7"):
        best(1.0, 1.0, PRICE, 0.5)


def test_from_measured_steps():
    """The noise is a mean over steps; the budget is what the pilot's step cost, and its noise the measure."""
    noise = np.array([[0.5, 20.0], [1.5, 40.0], [1.0, 30.0], [1.0, 30.0]])
    found = together(noise, PRICE, (10, 32), None, 200, 0)
    assert (found.between, found.within, found.steps) == (1.0, 30.0, 4)
    assert found.budget == pytest.approx(10 * PRICE[30])
    assert (found.prompts, found.n) == best(1.0, 30.0, PRICE, found.budget)
    assert found.against == pytest.approx((1 + 30 / (found.n - 1)) / found.prompts / ((1 + 30 / 31) / 10))
    assert found.against <= 1
    assert found.n_low <= found.n <= found.n_high
    # The two extreme steps bound what any sample of them says.
    ends = [best(b, w, PRICE, found.budget)[1] for b, w in ((0.5, 40.0), (1.5, 20.0))]
    assert min(ends) <= found.n_low
    assert found.n_high <= max(ends)
    assert not found.unbounded
    assert together(noise, PRICE, (10, 32), 5.0, 200, 0).budget == 5.0

    said = text(found, COSTS)
    assert f"together {found.prompts} prompts of N = {found.n} (95% interval of N {found.n_low} to" in said
    assert UNKNOWN in said
    assert "own price" not in said
    assert "own price (--prefill, or --run of two N), here 0" in text(found, UNMEASURED)


def test_noise_that_is_not_told_from_zero():
    """No answer where its mean is not above 0; no upper end where samples of the steps are not."""
    few = np.array([[1.0, 30.0]] * 2)
    negative = np.array([[-2.0, 30.0], [0.5, 30.0], [1.0, 30.0]])
    for noise in (few, negative, np.zeros((0, 2))):
        assert together(noise, PRICE, (10, 32), None, 50, 0) is None
    assert "together unknown" in text(None, COSTS)
    loose = together(np.array([[-1.0, 30.0], [0.5, 30.0], [1.0, 30.0]]), PRICE, (10, 32), None, 200, 0)
    assert loose.unbounded
    assert "to what the budget buys" in text(loose, COSTS)


def test_the_steps_that_measured_it(tmp_path):
    """A step without it, or where it is unknown, says nothing."""
    rows = [
        {"step": 0, "theory_estimate/between": 1.0, "theory_estimate/within": 2.0},
        {"step": 1},
        {"step": 2, "theory_estimate/between": None, "theory_estimate/within": None},
        {"step": 3, "theory_estimate/between": -0.5, "theory_estimate/within": 4.0},
    ]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_noise([tmp_path / "a", tmp_path / "b"]).tolist() == [[1.0, 2.0], [-0.5, 4.0]] * 2
    assert read_noise([]).shape == (0, 2)
