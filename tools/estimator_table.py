"""Bias and coverage of the estimates that a user sees, by simulation: the tables of docs/measurements/estimators.md.

Usage: python tools/estimator_table.py [--repetitions 2000] [--seed 0]     # three minutes on one core

Truths are closed forms over distributions that are known, or where a figure is about what was drawn, computed from the
probabilities of what was drawn. Every row is a function of the seed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from megatron_brorl.algo.estimators import bootstrap_mean, pass_at_k
from megatron_brorl.theory.advisor import kept_share, spread
from megatron_brorl.theory.diagnostics import answer_level, coupling, good_turing, hold_out
from megatron_brorl.theory.mass_balance import expected_masses, masses, theorem_1
from megatron_brorl.theory.token_level import token_level

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Right = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Answers:
    """A distribution over V answers, each right or wrong."""

    name: str
    p: Floats  # [V]
    right: Right  # [V]

    def draw(self, rng: np.random.Generator, n: int) -> Ints:
        """n answers."""
        return np.searchsorted(self.p.cumsum()[:-1], rng.random(n), side="right").astype(np.int64)


def distributions() -> list[Answers]:
    """Uniform over many, Zipf's, a rare right answer beside a common wrong one, and one whose draws all differ."""
    many, distinct = 1_000, 100_000
    zipf = 1 / np.arange(1, 301)
    return [
        Answers("uniform, 1,000", np.full(many, 1 / many), np.arange(many) % 3 == 0),
        Answers("Zipf, 300", zipf / zipf.sum(), np.arange(300) % 3 == 0),
        Answers("rare right, 1 in 50", np.array([0.98, 0.02]), np.array([False, True])),
        Answers("all differ", np.full(distinct, 1 / distinct), np.arange(distinct) % 3 == 0),
    ]


@dataclass(frozen=True)
class Line:
    """What one estimate did on one distribution."""

    name: str
    n: int
    case: str
    truth: float  # mean over repetitions
    bias: float  # mean of estimate - truth
    bias_se: float
    coverage: float | None = None  # of the 95% interval, unknown ones not counted; None: it has none
    width: float = float("nan")  # mean
    unknown: float = 0.0  # share of repetitions whose interval is unknown


def line(name: str, n: int, case: str, found: Floats, truth: Floats | float, ends: Floats | None = None) -> Line:
    """From estimates [R], truths [R] or one, and the ends of intervals [R, 2]."""
    truths = np.broadcast_to(truth, found.shape)
    error = found - truths
    told = (float(truths.mean()), float(error.mean()), float(error.std(ddof=1)) / len(error) ** 0.5)
    if ends is None:
        return Line(name, n, case, *told)
    known = np.isfinite(ends).all(1)
    low, high = ends[known].T
    # A truth at the end of its range is held by an interval that ends there, but for rounding.
    inside = (low <= truths[known] + 1e-12) & (truths[known] - 1e-12 <= high)
    return Line(name, n, case, *told, float(inside.mean()), float((high - low).mean()), float(1 - known.mean()))


def of_unseen(case: Answers, n: int, repetitions: int, rng: np.random.Generator) -> Iterator[Line]:
    """Good-Turing, of one group of n siblings: unbiased for n - 1, its interval for what this group has not seen."""
    p, right = case.p, case.right
    groups = [(x := case.draw(rng, n), right[x]) for _ in range(repetitions)]

    # One estimate, two truths.
    found = [good_turing(*g) for g in groups]
    before = expected_masses(p, right, n - 1)
    missed = np.array([1 - p[np.unique(x)].sum() for x, _ in groups])
    mass = np.array([f.unseen_mass for f in found])
    ends = np.array([(f.low, f.high) for f in found])
    covered = line("", n, case.name, mass, missed, ends)
    biased = line("", n, case.name, mass, before.u_pos + before.u_neg)
    told = (biased.truth, biased.bias, biased.bias_se, covered.coverage, covered.width, covered.unknown)
    yield Line("good_turing/unseen_mass", n, case.name, *told)
    yield line("good_turing/unseen_right", n, case.name, np.array([f.unseen_right for f in found]), before.u_pos)


def of_answers(case: Answers, n: int, repetitions: int, rng: np.random.Generator) -> Iterator[Line]:
    """The other estimates from final answers alone, of one group of n siblings."""
    p, right = case.p, case.right
    groups = [(x := case.draw(rng, n), right[x]) for _ in range(repetitions)]

    # Hold-out, for few and for half of the siblings.
    held = [2, n // 2]
    curves = [hold_out([g], held) for g in groups]
    for i, h in enumerate(held):
        e = expected_masses(p, right, n - h)
        for name, truth in (("unsampled_mass", e.u_pos + e.u_neg), ("u_pos2", e.u_pos2), ("u_neg2", e.u_neg2)):
            values, low, high = (np.array([getattr(c, name + end)[i] for c in curves]) for end in ("", "_low", "_high"))
            label = f"hold_out/{name}_{'2' if i == 0 else 'N/2'}"
            yield line(label, n, case.name, values, truth, np.stack([low, high], axis=1))

    # The theorem's terms on answers, against those of the draws; and the coupling at half of them.
    q = float(p[right].sum())
    levels = [answer_level(*g) for g in groups]
    truths = [theorem_1(masses(p, np.bincount(x, minlength=len(p)), right), 1 - q, -q, 1.0) for x, _ in groups]
    for name, truth in (
        ("s_r", [t.s_r for t in truths]),
        ("sampled", [t.sampled_right + t.sampled_wrong for t in truths]),
        ("unsampled", [t.unsampled for t in truths]),
    ):
        values = np.array([getattr(level, name) for level in levels])
        yield line(f"hold_out/{name}", n, case.name, values, np.array(truth, dtype=np.float64))
    e = expected_masses(p, right, n // 2)
    values = np.array([coupling(*g, np.array([n // 2]))[0] for g in groups])
    yield line("advise: coupling at N/2", n, case.name, values, e.q_pos * e.u_neg2 + e.q_neg * e.u_pos2)


def of_verdicts(rate: float, n: int, repetitions: int, rng: np.random.Generator) -> Iterator[Line]:
    """The estimates from right and wrong alone, of one prompt with this success rate."""
    c, case, half = rng.binomial(n, rate, repetitions), f"success rate {rate:g}", n // 2
    size = np.full(repetitions, n)
    yield line("spread, s (1 - s)", n, case, spread(c, size), rate * (1 - rate))
    yield line("advise: kept share at N/2", n, case, kept_share(c, size, half), 1 - rate**half - (1 - rate) ** half)
    passes = np.array([pass_at_k(n, int(x), half) for x in c])
    yield line("pass@N/2", n, case, passes, 1 - (1 - rate) ** half)


def of_tokens(name: str, worth: Floats, n: int, repetitions: int, rng: np.random.Generator) -> Iterator[Line]:
    """The estimates at one position, where n siblings drew tokens that are worth `worth` [V]."""
    p = 1 / np.arange(1, len(worth) + 1)
    p /= p.sum()
    q = float(p @ worth)
    token = rng.choice(len(p), size=(repetitions, n), p=p)
    reward = (rng.random(token.shape) < worth[token]).astype(np.float64)

    # Every repetition is a position of its own.
    position = np.repeat(np.arange(repetitions), n)
    logits = torch.from_numpy(np.log(p)).expand(repetitions, -1)
    draws = (torch.from_numpy(x.reshape(-1)) for x in (position, token, reward))
    level = token_level(logits, *draws)
    expected = (n - 1) / n * float(np.square(p * (worth - q)).sum())
    yield line("estimate/policy_gradient", n, name, level.policy_gradient.numpy(), expected)

    # The surrogate's step by one half, every other sibling, at the true worths; the mean over both halves.
    change = np.zeros(repetitions)
    for h in (0, 1):
        for r in range(repetitions):
            x, y = token[r, h::2], reward[r, h::2]
            count = np.bincount(x, minlength=len(p))
            better = np.where(count > 0, np.bincount(x, y, len(p)) / np.maximum(count, 1) - y.mean(), 0.0)
            drawn = np.where(count > 0, better - better @ p, 0.0)
            change[r] += float(np.square(p) * (worth - q) @ drawn) / n / 2
    yield line("estimate/sampled", n, name, level.sampled.numpy(), change)


def of_pass_at_1(prompts: int, repetitions: int, rng: np.random.Generator) -> Iterator[Line]:
    """pass@1 of held-out prompts with its bootstrap interval over prompts, success rates drawn from beta(0.4, 0.6)."""
    rates = rng.beta(0.4, 0.6, size=(repetitions, prompts))
    shares = rng.binomial(8, rates) / 8
    found = [bootstrap_mean(row.tolist(), 200, i) for i, row in enumerate(shares)]
    ends = np.array([(f.low, f.high) for f in found])
    yield line("pass@1", 8, f"{prompts} prompts", np.array([f.mean for f in found]), 0.4, ends)


def table(repetitions: int, seed: int, sizes: tuple[int, ...] = (16, 64)) -> list[Line]:
    """All lines; every case has random numbers of its own."""
    lines: list[Line] = []

    def fresh() -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=np.array([seed, len(lines)], dtype=np.uint64)))

    worths = {"tokens worth alike": np.full(50, 0.5), "a third worth 0.9, others 0.2": np.resize([0.9, 0.2, 0.2], 50)}
    for n in sizes:
        for case in distributions():
            lines += of_unseen(case, n, repetitions, fresh())
            lines += of_answers(case, n, repetitions, fresh())
        for rate in (0.05, 0.5):
            lines += of_verdicts(rate, n, repetitions, fresh())
        for name, worth in worths.items():
            lines += of_tokens(name, worth, n, repetitions, fresh())
    for prompts in (20, 200):
        lines += of_pass_at_1(prompts, max(repetitions // 4, 2), fresh())
    return lines


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print("| figure | N | case | truth | bias | its standard error | coverage | mean width | unknown |")
    print("|---|---|---|---|---|---|---|---|---|")
    for x in table(args.repetitions, args.seed):
        interval = "| | |" if x.coverage is None else f"{x.coverage:.1%} | {x.width:.3g} | {x.unknown:.1%} |"
        print(f"| `{x.name}` | {x.n} | {x.case} | {x.truth:.4g} | {x.bias:+.2g} | {x.bias_se:.2g} | {interval}")


if __name__ == "__main__":
    main()
