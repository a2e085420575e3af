"""The simulator against torch's AdamW and autograd, and its accounts against measured changes."""

from __future__ import annotations

import csv
from dataclasses import replace

import numpy as np
import pytest
import torch
from command_line import error_line, output

from megatron_brorl.report.plots import simulation_figure
from megatron_brorl.theory.simulator import MOVED, PREDICTED, Settings, simulate, write_csv

SMALL = Settings(vocabulary=300, correct=40, steps=60)


def _by_torch(n: int, seed: int, settings: Settings) -> list[float]:
    """Return Q_pos after every step, by torch.optim and autograd on the paper's loss over single draws."""
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, n])))
    logits = torch.zeros(settings.vocabulary, dtype=torch.float64)
    logits[: settings.correct] = 3.0
    logits[0] = 5.0
    logits.requires_grad_()
    if settings.optimizer == "adamw":
        optimizer = torch.optim.AdamW([logits], settings.lr, (0.9, 0.999), settings.eps, settings.weight_decay)
    else:
        optimizer = torch.optim.SGD([logits], settings.lr)
    result = [float(torch.softmax(logits.detach(), 0)[: settings.correct].sum())]
    for _ in range(settings.steps):
        p = torch.softmax(logits, 0)
        edges = p.detach().cumsum(0)
        draws = torch.searchsorted(edges, torch.from_numpy(rng.random(n)) * edges[-1], right=True)
        rewards = torch.where(draws < settings.correct, 1.0, -1.0).double()
        loss = -((rewards - rewards.mean()) * p[draws]).sum() / n
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        result.append(float(torch.softmax(logits.detach(), 0)[: settings.correct].sum()))
    return result


@pytest.mark.parametrize(
    "changes", [{}, {"eps": 1e-12, "lr": 0.02}, {"optimizer": "sgd", "weight_decay": 0.0, "lr": 5.0}]
)
@pytest.mark.parametrize("n", [3, 200])
def test_curves_are_those_of_torch(changes, n):
    settings = replace(SMALL, **changes)
    np.testing.assert_allclose(simulate(n, 7, settings).column("q_pos"), _by_torch(n, 7, settings), rtol=1e-10)


def test_both_accounts_explain_a_plain_step():
    """In a small plain gradient step, prediction and split are equal; the measured change differs by order lr^2."""
    curve = simulate(n=8, seed=1, settings=replace(SMALL, optimizer="sgd", weight_decay=0.0, lr=1e-3))
    for predicted, moved in zip(PREDICTED, MOVED, strict=False):
        np.testing.assert_allclose(curve.column(moved), curve.column(predicted), rtol=1e-9, atol=1e-18)
    total = sum(curve.column(name) for name in PREDICTED)
    np.testing.assert_allclose(curve.column("measured"), total, atol=1e-9)
    assert np.abs(total).max() > 1e-7


def test_the_split_of_adamw_adds_up():
    curve = simulate(n=8, seed=1, settings=SMALL)
    total = sum(curve.column(name) for name in MOVED)
    # The error is of second order in a step of at most lr per logit, about Q (1 - Q) lr^2.
    np.testing.assert_allclose(curve.column("measured"), total, atol=SMALL.lr**2)
    assert np.abs(curve.column("measured")[1:]).min() > 3 * SMALL.lr**2


def test_the_paper_setting():
    """The values are means over 8 seeds from an independent NumPy program."""
    summary = simulate(n=16, seed=0, settings=Settings()).summary()
    assert summary["q_pos_initial"] == pytest.approx(0.6301, abs=5e-5)
    assert summary["q_pos_final"] == pytest.approx(0.6074, abs=0.002)
    assert summary["improved_share"] == pytest.approx(0.317, abs=0.02)
    assert -2e-4 < summary["worst_drop"] < -1e-7


def test_csv_holds_states_and_sums(tmp_path):
    curve = simulate(n=8, seed=1, settings=replace(SMALL, steps=25))
    write_csv(tmp_path / "c.csv", [curve], every=10)
    rows = list(csv.DictReader((tmp_path / "c.csv").read_text(encoding="utf-8").splitlines()))
    assert [int(r["step"]) for r in rows] == [0, 10, 20, 25]
    assert [float(r["q_pos"]) for r in rows] == pytest.approx(curve.column("q_pos")[[0, 10, 20, 25]].tolist(), rel=1e-8)
    assert float(rows[2]["measured"]) == pytest.approx(curve.column("measured")[11:21].sum(), rel=1e-8)
    total = sum(float(r["moved_unsampled"]) for r in rows)
    assert total == pytest.approx(curve.column("moved_unsampled").sum(), rel=1e-8)


def test_the_figure_shows_the_curves():
    curves = [simulate(n, seed, SMALL) for n in (4, 64) for seed in (0, 1)]
    axes = simulation_figure(curves, SMALL).axes
    for panel, name in enumerate(("q_pos", "improved_share", "worst_drop")):
        for line, curve in zip(axes[panel].lines, curves, strict=False):
            assert np.asarray(line.get_ydata()).tolist() == curve.column(name).tolist()
    not_drawn = axes[3].containers[2]
    assert not_drawn.get_label() == "not drawn"
    assert [bar.get_height() for bar in not_drawn] == pytest.approx(
        [np.mean([curve.column("moved_unsampled").sum() for curve in curves if curve.n == n]) for n in (4, 64)]
    )
    shares = [bar.get_height() for bar in axes[5].containers[1]]  # of steps that raise Q_pos, by N
    assert shares[0] == pytest.approx(np.mean([(curve.column("measured")[1:] > 0).mean() for curve in curves[:2]]))


def test_the_command_prints_a_summary_and_draws_a_figure(tmp_path, capsys):
    out = tmp_path / "sim"
    small = ["--vocabulary", "300", "--correct", "40", "--steps", "60"]
    text = output(capsys, "simulate", *small, "--n", "8", "4", "--seeds", "3", "--out", out)
    rows = [line.split() for line in text.splitlines()[1:3]]
    summaries = [simulate(n, 3, SMALL).summary() for n in (4, 8)]
    assert [row[3] for row in rows] == [f"{summary['q_pos_final']:.4f}" for summary in summaries]
    assert (out / "simulate.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--correct", "128000"], "correct = 128000: must be less than vocabulary"),
        (["--eps", "0"], "eps = 0.0: must be a positive number"),
        (["--n", "0"], "draws must be at least 1"),
        (["--steps", "0"], "steps = 0"),
    ],
)
def test_mistakes_end_in_one_line(arguments, message, capsys, tmp_path):
    assert message in error_line(capsys, "simulate", *arguments, "--out", tmp_path / "x")
