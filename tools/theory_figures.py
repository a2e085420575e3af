"""Make the figures of docs/theory.md and print the numbers in its text. About four minutes on two cores.

Usage: python tools/theory_figures.py [--only terms eps simulate advice] [--out docs/theory]
       python tools/theory_figures.py --only intervals     # another seven minutes, no figure
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogLocator, PercentFormatter

from megatron_brorl.report.advice import plot_advice
from megatron_brorl.report.simulation import plot_simulation
from megatron_brorl.report.style import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, panel, save
from megatron_brorl.theory.advisor import advise
from megatron_brorl.theory.costs import UNMEASURED, Costs
from megatron_brorl.theory.log import LoggedGroup
from megatron_brorl.theory.mass_balance import (
    draw_weights,
    expected_masses,
    first_order,
    general_terms,
    masses,
    score_step,
    theorem_1,
)
from megatron_brorl.theory.simulate import Settings, simulate
from megatron_brorl.theory.targets import Targets

Floats = npt.NDArray[np.float64]
DRAWS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
TRIALS = 1500


def zipf(vocabulary: int, exponent: float, seed: int) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """A distribution with a heavy tail, a fifth of its tokens correct."""
    rng = np.random.default_rng(seed)
    p = 1 / np.arange(1, vocabulary + 1) ** exponent
    return rng.permutation(p / p.sum()), rng.random(vocabulary) < 0.2


def terms(out: Path) -> None:
    """Expectations and signs of Theorem 1's terms on known distributions."""
    figure = Figure(figsize=(13.5, 4.3), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    left, middle, right = figure.subplots(1, 3)
    n = np.unique(np.logspace(0, 5.5, 80).astype(int))
    panel(left, "Second moment not drawn", "expected share of the whole", "N (draws)")
    for exponent, color in ((0.0, RED), (0.7, ORANGE), (1.1, GREEN), (1.6, BLUE)):
        p, correct = zipf(20_000, exponent, 0)
        moments = [expected_masses(p, correct, int(k)) for k in n]
        label = "uniform" if exponent == 0 else f"Zipf {exponent}"
        shares = [float((m.u_pos2 + m.u_neg2) / (p @ p)) for m in moments]
        left.plot(n, shares, color=color, linewidth=1.8, label=f"{label}, largest p {p.max():.0e}")
    left.set_ylim(-0.03, 1.5)
    left.set_yticks([0, 0.25, 0.5, 0.75, 1.0])
    left.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    left.legend(frameon=False, fontsize=9, loc="upper right")

    p, correct = zipf(2000, 0.9, 1)
    rng = np.random.default_rng(2)
    rows = []
    for k in DRAWS:
        counts = rng.multinomial(k, p, size=TRIALS)
        t = theorem_1(masses(p, counts, correct), 1.0, -1.0, 1.0)
        rewards = np.where(correct, 1.0, -1.0)
        weights = draw_weights(counts, rewards - (counts @ rewards / k)[:, None])
        g = general_terms(p, counts, weights, correct, 1.0)
        s = first_order(p, score_step(p, weights, counts.sum(-1), 1.0), correct).sum(-1)
        drawn = t.sampled_right + t.sampled_wrong
        rows.append(
            (
                *(drawn.mean(), np.abs(t.unsampled).mean(), t.total.mean(), (t.total < 0).mean()),
                *((g.total < 0).mean(), (s < 0).mean(), (t.unsampled < 0).mean()),
            )
        )
    found = np.array(rows)
    names = "drawn", "|not drawn|", "total", "total<0", "general<0", "score<0", "third<0"
    print(f"{'N':>6} " + " ".join(f"{name:>12}" for name in names))
    for k, row in zip(DRAWS, found, strict=True):
        print(f"{k:>6} " + " ".join(f"{x:>12.3g}" for x in row))
    panel(middle, "Theorem 1 at a fixed step size", r"change of $Q_{pos}$ per $\eta$", "N (draws)")
    middle.plot(DRAWS, found[:, 0], "o-", color=GREEN, markersize=4, label="drawn tokens, mean")
    middle.plot(DRAWS, found[:, 1], "o-", color=RED, markersize=4, label="tokens not drawn, mean size")
    middle.plot(DRAWS, found[0, 0] * 4 / np.array(DRAWS), "--", color=GREY, linewidth=1, label="1 / N")
    middle.set_yscale("log")
    middle.legend(frameon=False, fontsize=9)
    panel(right, "Draws that lower the mass", "share of draws", "N (draws)")
    for column, label, color in (
        (3, "distinct sets (Theorem 1)", BLUE),
        (4, "multiplicities and mean baseline", PURPLE),
        (5, "policy gradient, mean baseline", SKY),
    ):
        right.plot(DRAWS, found[:, column], "o-", color=color, markersize=4, label=label)
    right.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    right.legend(frameon=False, fontsize=9)
    for axes in figure.axes:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(numticks=7))
    save(figure, out / "terms.png")


def eps(out: Path) -> None:
    """What AdamW's eps decides."""
    values = (1e-6, 1e-8, 1e-9, 1e-10, 1e-11, 1e-12)
    figure = Figure(figsize=(6.6, 4.3), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    axes = figure.subplots()
    panel(axes, "AdamW's eps decides the sign", "$Q_{pos}$ after 1000 steps", "AdamW's eps")
    for n, color in ((4, RED), (16, GREEN), (512, SKY)):
        found = [simulate(n, 0, Settings(eps=e)).summary()["q_pos_final"] for e in values]
        print(f"N = {n}: " + ", ".join(f"eps {e:g}: {q:.4f}" for e, q in zip(values, found, strict=True)))
        axes.plot(values, found, "o-", color=color, label=f"N = {n}")
    axes.axhline(0.6301, color=GREY, linestyle=":", linewidth=1, label="start")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(numticks=8))
    axes.legend(frameon=False, fontsize=9)
    save(figure, out / "eps.png")


def simulation(out: Path) -> None:
    """The figure of `brorl simulate` with its defaults."""
    curves = [simulate(n, seed, Settings()) for n in (4, 8, 16, 512, 51200) for seed in range(4)]
    for c in curves[::4]:
        parts = {name: float(c.column(name).sum()) for name in ("measured", "moved_unsampled", "moved_decay")}
        print(f"N = {c.n}: {c.summary()} {parts}")
    plot_simulation(curves, Settings(), out / "simulate.png")


def advice(out: Path) -> None:
    """An example of `brorl advise`: a made-up pilot whose truth is known."""
    rng = np.random.default_rng(0)
    rates = np.where(rng.random(300) < 0.15, 0.0, rng.beta(0.5, 0.7, size=300))
    groups = []
    for i, rate in enumerate(rates):
        right = rng.random(64) < rate
        p = 1 / np.arange(1, 60) ** 1.3
        outcomes = np.where(right, 0, 1 + rng.choice(59, size=64, p=p / p.sum()))
        groups.append(LoggedGroup(str(i), None, right.astype(np.float64), outcomes, None, None, None))
    costs = Costs(prefill=2.0, decode=0.2, train=0.3, fixed=20.0)
    found = advise(groups, 1.0, costs, 128)
    for c in found.candidates:
        truth = float(np.mean(1 - rates**c.n - (1 - rates) ** c.n))
        print(f"N = {c.n}: kept {c.kept}, true {truth:.3f}")
    plot_advice(found, Targets(), costs.unit, out / "advice.png")


def intervals(out: Path) -> None:
    """How often, and how wide: the interval for N = 512 from pilots of 512 rollouts that are cut to 16 and to 64."""
    shapes: dict[str, Callable[[np.random.Generator], Floats]] = {
        "beta": lambda rng: rng.beta(0.4, 0.6, size=300),
        "unsolvable": lambda rng: np.where(rng.random(300) < 0.3, 0.0, rng.beta(0.6, 0.5, size=300)),
        "rare": lambda rng: 10 ** rng.uniform(-3.5, 0, size=300),
    }
    for n, repetitions in ((16, 40), (64, 25)):
        for i, (name, shape) in enumerate(shapes.items()):
            rng = np.random.default_rng(1000 + i)
            pilot = rng.binomial(512, shape(rng))
            hits, widths, errors = 0, [], []
            for seed in range(repetitions):
                whole = rng.choice(pilot, size=300)
                truth = np.mean((whole > 0) & (whole < 512))
                cut = rng.hypergeometric(whole, 512 - whole, n)
                groups = [
                    LoggedGroup(str(k), None, (np.arange(n) < c).astype(np.float64), None, None, None, None)
                    for k, c in enumerate(cut)
                ]
                kept = advise(groups, 1.0, UNMEASURED, 100, 60, seed, candidates=(n, 512)).candidates[1].kept
                hits += int(kept.low <= truth <= kept.high)
                widths.append(kept.high - kept.low)
                errors.append(kept.mean - truth)
            print(
                f"n = {n}, {name}: inside {hits} of {repetitions}, mean width {np.mean(widths):.3f}, "
                f"error of the value {np.sqrt(np.mean(np.square(errors))):.3f} (rms)"
            )


def main() -> None:
    makers: dict[str, Any] = {"terms": terms, "eps": eps, "simulate": simulation, "advice": advice}
    usual = list(makers)
    makers["intervals"] = intervals
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(makers), default=usual)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "theory")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        makers[name](args.out)


if __name__ == "__main__":
    main()
