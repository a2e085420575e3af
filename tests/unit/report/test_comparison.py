"""Tests of tables and figures of evaluations against values computed by hand."""

from __future__ import annotations

import itertools
import json

import pytest

from megatron_brorl.errors import UserError
from megatron_brorl.report import comparison
from megatron_brorl.report.comparison import compare, read_answers


def answers(shift):
    """Return rows by (benchmark, id), with 4 samples each. shift: added to `right`, and subtracted from `tokens`."""
    rights = {("math", "a"): 1, ("math", "b"): 2, ("math", "c"): 0, ("code", "a"): 3, ("code", "b"): 1}
    return {
        (name, row): {"benchmark": name, "id": row, "samples": 4, "right": right + shift, "tokens": 10.0 + i - shift}
        for i, ((name, row), right) in enumerate(rights.items())
    }


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows.values()), encoding="utf-8")
    return path


def test_comparison_against_values_by_hand(tmp_path):
    before, after = answers(0), answers(1)
    after["math", "b"]["right"] = 0
    files = write(tmp_path / "a", before), write(tmp_path / "b", after)
    result = compare(*map(read_answers, files), "A/", "B/")
    everything = result["all"]
    assert everything["prompts"] == 5
    assert everything["before"]["pass_at_1"]["mean"] == pytest.approx((1 + 2 + 0 + 3 + 1) / 20)
    assert everything["after"]["pass_at_1"]["mean"] == pytest.approx((2 + 0 + 1 + 4 + 2) / 20)
    assert everything["before"]["response_tokens"] == pytest.approx(12.0)
    assert everything["after"]["response_tokens"] == pytest.approx(11.0)
    assert everything["paired"]["difference"]["mean"] == pytest.approx((1 - 2 + 1 + 1 + 1) / 20)
    assert result["benchmarks"]["math"]["after"]["pass_at_1"]["mean"] == pytest.approx(3 / 12)
    assert result["benchmarks"]["code"]["prompts"] == 2
    text = comparison.markdown(result)
    assert "| math | 3 | 25.00% | 25.00% | +0.00%" in text
    assert "| code | 2 | 50.00% | 75.00% | +25.00%" in text
    assert "| all prompts | 5 | 35.00% | 45.00% | +10.00%" in text
    assert "mean difference +0.1000" in text
    # 4 samples: pass@4 is the share of prompts with a right one. math/b lost its right samples, math/c gained one.
    assert [everything[side]["pass_at_k"]["4"] for side in ("before", "after")] == [4 / 5, 4 / 5]
    assert (everything["lost"], everything["gained"]) == (1, 1)
    assert "A pass@4 | B pass@4" in text
    assert "| 66.67% | 66.67% |" in text
    assert "right answer among their samples only in A: 1, only in B: 1." in text
    figure = comparison.comparison_figure(result)
    bars = [bar.get_height() for bar in figure.axes[0].patches]
    assert bars == pytest.approx([0.5, 0.75, 0.25, 0.25, 0.35, 0.45])
    assert [line.get_xdata()[0] for line in figure.axes[2].lines][-2:] == pytest.approx([12.0, 11.0])


def test_mean_rewards_other_than_pass_at_1_by_hand(tmp_path):
    """Compare rewards whose differences are -4, 2 and 8 in one benchmark, and 2 and 2 in the other.

    The three draws of a bootstrap sample all equal -4 with probability 1/27, above 2.5%. So the interval ends there.
    """
    before, after = answers(0), answers(0)
    for i, (key, difference) in enumerate(zip(before, (-4, 2, 8, 2, 2), strict=True)):
        before[key]["reward"] = -10.0 * i
        after[key]["reward"] = difference - 10.0 * i
    files = [read_answers(write(tmp_path / name, rows)) for name, rows in (("a", before), ("b", after))]
    result = compare(*files, "A/", "B/")
    text = comparison.markdown(result)
    assert "| A mean reward | B mean reward | B - A (95% interval) |" in text
    assert "| -10 | -8 | +2 (-4 to +8) |" in text
    assert "| -35 | -33 | +2 (+2 to +2) |" in text
    # The exact bootstrap over all prompts: the sums of all 5^5 samples, in order.
    sums = sorted(sum(draw) for draw in itertools.product((-4, 2, 8, 2, 2), repeat=5))
    low, high = (sums[int(quantile * (5**5 - 1))] / 5 for quantile in (0.025, 0.975))
    assert f"mean reward went from -20 to -18, +2 (95% interval {low:g} to +{high:g})." in text
    (reward,) = comparison.comparison_figure(result).axes[3:]
    assert [line.get_ydata()[0] for line in reward.lines if line.get_marker() == "o"] == [-35, -33, -10, -8, -20, -18]


@pytest.mark.parametrize(("text", "message"), [("", "contains no prompts"), ("[1]", "not written by `brorl evaluate`")])
def test_a_file_without_answers_is_refused(tmp_path, text, message):
    (tmp_path / "x.jsonl").write_text(text + "\n" if text else "", encoding="utf-8")
    with pytest.raises(UserError, match=f"x.jsonl: {message}"):
        read_answers(tmp_path / "x.jsonl")


def test_evaluations_of_different_prompts_are_refused():
    after = answers(0)
    del after["code", "b"]
    with pytest.raises(UserError, match="1 prompts are only in one of them, for example 'b' of code in one/"):
        compare(answers(0), after, "one/", "two/")


def parts(mean, passes, tokens):
    return {
        "pass_at_1": {"mean": mean, "low": mean - 0.1, "high": mean + 0.1},
        "mean_reward": {"mean": mean + 0.05, "low": mean, "high": mean + 0.1},
        "verifiers": ["exact", "math"],
        "pass_at_k": passes,
        "prompts": 7,
        "samples": 8,
        "response_tokens": tokens,
    }


def test_table_and_figure_of_an_evaluation():
    result = {
        **parts(0.4, {"1": 0.4, "8": 0.7}, 20.0),
        "by_task": {"gcd": {"mean": 0.25, "low": 0.125, "high": 0.5}},
        "mean_of_benchmarks": parts(0.45, {}, 0.0),
        "benchmarks": {"aime": parts(0.3, {"1": 0.3, "8": 0.6}, 30.0), "amc": parts(0.6, {"1": 0.6, "8": 0.9}, 11.0)},
    }
    text = comparison.evaluation_markdown(result)
    cells = "30.00% (20.00% to 40.00%) | 0.35 (0.3 to 0.4) | 60.00% | 30.0 |"
    assert f"| aime | exact, math | 7 | 8 | {cells}" in text
    cells = "45.00% (35.00% to 55.00%) | 0.5 (0.45 to 0.55) | 75.00% | 20.5 |"  # e.g. 20.5 = (30 + 11) / 2
    assert f"| mean of benchmarks |  | 7 | 8 | {cells}" in text
    assert "| gcd | 25.00% (12.50% to 50.00%) |" in text
    figure = comparison.evaluation_figure(result)
    assert [bar.get_height() for bar in figure.axes[0].patches] == [0.3, 0.6]
    assert [list(line.get_ydata()) for line in figure.axes[1].lines] == [[0.3, 0.6], [0.6, 0.9]]
    assert [bar.get_height() for bar in figure.axes[2].patches] == [30.0, 11.0]
