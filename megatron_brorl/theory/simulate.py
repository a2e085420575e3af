"""BroRL's token simulator (section 4.1): one softmax over 128,000 tokens, trained with N draws per step.

10,000 tokens are correct and pay +1, the others pay -1. Each step draws N tokens, subtracts the mean reward of the
draws and makes an AdamW step on L = -(1/N) sum over draws of (R - b) p. What the paper leaves open is a field of
`Settings`; the defaults are the choice that fits the axes of its Fig. 3 best (docs/theory.md).

Beside the curves stand two accounts of the change of Q_pos. `predicted`: the terms of Theorem 1 in its general form,
for one plain gradient step of size lr. `moved`: the first-order change that the optimizer's actual step makes, split by
the gradients it was made of. AdamW's step is linear in its first moment, so a second first moment, fed only with the
gradients of undrawn tokens, splits every step exactly.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from megatron_brorl.errors import UserError

Floats = npt.NDArray[Any]

PREDICTED = ("predicted_right", "predicted_wrong", "predicted_unsampled")
MOVED = ("moved_right", "moved_wrong", "moved_unsampled", "moved_decay")
COLUMNS = ("step", "q_pos", "improved_share", "worst_drop", "measured", *PREDICTED, *MOVED)


@dataclass(frozen=True)
class Settings:
    """One simulation but for N and the seed. Stated in the paper down to `lr`; open below it."""

    vocabulary: int = 128_000
    correct: int = 10_000  # tokens 0 .. correct - 1
    steps: int = 1000
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8  # the gradients are about 1e-9, so this one decides the sign at small N
    weight_decay: float = 0.01
    optimizer: Literal["adamw", "sgd"] = "adamw"
    seed_logit: float = 3.0  # of every correct token; 0 starts from the uniform distribution
    anchor: Literal["correct", "incorrect", "none"] = "correct"
    anchor_logit: float = 5.0
    anchor_fixed: bool = False  # hold the anchor's logit at its value
    draws: Literal["multiplicity", "distinct"] = "multiplicity"  # a token drawn twice: two terms of the loss, or one
    gradient: Literal["probability", "log"] = "probability"  # differentiate p as the paper does, or log p (REINFORCE)
    baseline: Literal["mean", "none"] = "mean"
    drop_against: Literal["start", "previous"] = "start"  # the worst drop is against step 0, or the step before
    dtype: Literal["float64", "float32"] = "float64"

    def __post_init__(self) -> None:
        for name in ("vocabulary", "correct", "steps"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} = {getattr(self, name)}: must be at least 1")
        if self.correct >= self.vocabulary:
            raise UserError(f"correct = {self.correct}: must be less than vocabulary = {self.vocabulary}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} = {getattr(self, name)}: must be in [0, 1)")
        for name in ("lr", "eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} = {getattr(self, name)}: must be a positive number")
        if not 0 <= self.weight_decay < math.inf:
            raise UserError(f"weight_decay = {self.weight_decay}: must not be negative")


@dataclass(frozen=True)
class Curves:
    """What one simulation recorded. Row 0 is the start; row t is the state after step t and what that step did."""

    n: int
    seed: int
    values: Floats  # [steps + 1, len(COLUMNS)] float64

    def column(self, name: str) -> Floats:
        """[steps + 1] of one of COLUMNS. measured, predicted_* and moved_* are changes of Q_pos by one step."""
        column: Floats = self.values[:, COLUMNS.index(name)]
        return column

    def summary(self) -> dict[str, float | int]:
        """The row of `brorl simulate --json`; worst_drop is the worst of the whole run, and 0 at step 0 is no part."""
        return {
            "N": self.n,
            "seed": self.seed,
            "q_pos_initial": float(self.column("q_pos")[0]),
            "q_pos_final": float(self.column("q_pos")[-1]),
            "improved_share": float(self.column("improved_share")[-1]),
            "worst_drop": float(self.column("worst_drop")[1:].min()),
        }


def simulate(n: int, seed: int, settings: Settings, tell: Callable[[int], None] = lambda step: None) -> Curves:
    """Run settings.steps steps with N = n draws; `tell` hears of every step. A function of its arguments only."""
    if n < 1:
        raise UserError(f"N = {n}: must be at least 1")
    s, c = settings, settings.correct

    # The start: logits, probabilities, and everything the curves compare with.
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, n])))
    z, anchor = _logits(s)
    p = _softmax(z)  # [V]
    start, before = p[:c].copy(), p[:c].copy()
    optimizer = _Optimizer(s)
    q = float(p[:c].sum(dtype=np.float64))  # Q_pos
    rows = np.zeros((s.steps + 1, len(COLUMNS)))
    rows[0, 1] = q

    for step in range(1, s.steps + 1):
        # Draw.
        tokens, counts = _draw(p, n, rng)
        weights = _weights(tokens, counts, n, s)  # of each distinct token in the loss
        drawn = p[tokens]

        # The gradient of L on every logit is `slope` p_j, and on the drawn ones there is a part of their own.
        if s.gradient == "probability":
            mass = float(weights @ drawn)
            own, slope = -weights * drawn / n, mass / n
        else:
            mass = float(weights.sum())
            own, slope = -weights / n, mass / n

        # Predict, then step: what is predicted is a function of the state before.
        predicted = _terms(p, q, tokens, own, slope, s)
        parts = optimizer.step(z, p, q, tokens, own, slope)
        if anchor is not None and s.anchor_fixed:
            z[anchor] = s.anchor_logit

        # Record what the step did.
        p = _softmax(z)
        now = float(p[:c].sum(dtype=np.float64))
        drop = float((p[:c] - before).min())  # the most negative change
        improved = float((p[:c] > start).mean())
        rows[step] = (step, now, improved, drop, now - q, *predicted, *parts)

        # What the next step is compared with.
        q = now
        if s.drop_against == "previous":
            before = p[:c].copy()
        tell(step)
    return Curves(n, seed, rows)


def _logits(s: Settings) -> tuple[Floats, int | None]:
    """Initial logits [V] and which one is the anchor."""
    z = np.zeros(s.vocabulary, dtype=s.dtype)
    z[: s.correct] = s.seed_logit
    anchor = {"correct": 0, "incorrect": s.correct, "none": None}[s.anchor]
    if anchor is not None:
        z[anchor] = s.anchor_logit
    return z, anchor


def _softmax(z: Floats) -> Floats:
    p = z - z.max()
    np.exp(p, out=p)
    p /= p.sum()
    return p


def _draw(p: Floats, n: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """The distinct tokens of n independent draws from p [V], ascending, and how often each came."""
    edges = np.cumsum(p, dtype=np.float64)
    uniforms = np.sort(rng.random(n))  # sorted look-ups stay in the cache
    tokens = np.searchsorted(edges, uniforms * edges[-1], side="right")
    first = np.flatnonzero(np.diff(tokens, prepend=-1))
    return tokens[first], np.diff(first, append=n)


def _weights(tokens: Floats, counts: Floats, n: int, s: Settings) -> Floats:
    """The factor of each distinct token in the loss: its centred reward, times its count if draws count one by one."""
    rewards = np.where(tokens < s.correct, 1.0, -1.0)
    baseline = float(counts @ rewards) / n if s.baseline == "mean" else 0.0
    centred = rewards - baseline
    return centred * counts if s.draws == "multiplicity" else centred


def _terms(p: Floats, q: float, tokens: Floats, own: Floats, slope: float, s: Settings) -> tuple[float, float, float]:
    """First-order change of Q_pos by one plain gradient step of size lr: drawn right, drawn wrong, undrawn tokens."""
    c, drawn = s.correct, p[tokens]
    right = tokens < c
    gain = drawn * np.where(right, 1 - q, -q) * -s.lr * (own + slope * drawn)
    square = drawn * drawn
    undrawn_right = float(p[:c] @ p[:c]) - float(square[right].sum())
    undrawn_wrong = float(p[c:] @ p[c:]) - float(square[~right].sum())
    unsampled = -s.lr * slope * ((1 - q) * undrawn_right - q * undrawn_wrong)
    return float(gain[right].sum()), float(gain[~right].sum()), unsampled


class _Optimizer:
    """torch.optim.AdamW, or plain gradient descent, with the account of where its step came from."""

    def __init__(self, s: Settings) -> None:
        self.s = s
        self.t = 0
        self.first, self.undrawn, self.second = (np.zeros(s.vocabulary, dtype=s.dtype) for _ in range(3))

    def step(
        self, z: Floats, p: Floats, q: float, tokens: Floats, own: Floats, slope: float
    ) -> tuple[float, float, float, float]:
        """Change z [V] in place; returns the parts of the first-order change of Q_pos, in the order of MOVED."""
        s, c = self.s, self.s.correct
        self.t += 1

        beta1, beta2 = (s.beta1, s.beta2) if s.optimizer == "adamw" else (0.0, 0.0)  # plain steps have no memory

        # First moments: of the gradients of undrawn tokens alone, and of all.
        gradient = slope * p  # [V]
        part = (1 - beta1) * gradient
        part[tokens] = 0
        self.undrawn *= beta1
        self.undrawn += part
        gradient[tokens] += own.astype(s.dtype)
        self.first *= beta1
        self.first += (1 - beta1) * gradient

        # Decoupled weight decay, and what it does to Q_pos.
        decay = 0.0
        if s.weight_decay:
            shrink = s.lr * s.weight_decay  # factor of every logit
            pull = p * z
            decay = -shrink * ((1 - q) * float(pull[:c].sum()) - q * float(pull[c:].sum()))
            z *= 1 - shrink

        # The step per unit of a first moment, in the buffer of the gradient, which is done with.
        if s.optimizer == "adamw":
            np.square(gradient, out=gradient)
            gradient *= 1 - beta2
            self.second *= beta2
            self.second += gradient
            scale = np.sqrt(self.second, out=gradient)
            scale /= math.sqrt(1 - beta2**self.t)
            scale += s.eps  # as torch.optim.AdamW: outside of the root
            np.divide(-s.lr / (1 - beta1**self.t), scale, out=scale)
        else:
            scale = np.full_like(z, -s.lr)

        # The step itself; what follows is its account.
        z += scale * self.first

        scale *= p  # from here on the change of p per unit of a first moment
        # Sums of p dz over each class: of the whole step, and of the part that undrawn tokens made.
        right, wrong = float(scale[:c] @ self.first[:c]), float(scale[c:] @ self.first[c:])
        idle_right, idle_wrong = float(scale[:c] @ self.undrawn[:c]), float(scale[c:] @ self.undrawn[c:])

        # To first order Q_pos gains 1 - Q of a right token's p dz, and loses Q of a wrong one's.
        return (
            (1 - q) * (right - idle_right),
            -q * (wrong - idle_wrong),
            (1 - q) * idle_right - q * idle_wrong,
            decay,
        )


def write_csv(path: Path, curves: Sequence[Curves], every: int) -> None:
    """One line per simulation and `every` steps; changes are sums over the steps since the line before."""
    changes = COLUMNS.index("measured")
    aside = path.with_name(f".{path.name}.writing")
    with open(aside, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["N", "seed", *COLUMNS])
        for c in curves:
            last = len(c.values) - 1
            sums = np.cumsum(c.values[:, changes:], axis=0)
            marks = sorted({*range(0, last + 1, every), last})
            for mark, previous in zip(marks, [0, *marks], strict=False):
                row = [*c.values[mark, 1:changes], *(sums[mark] - sums[previous])]
                writer.writerow([c.n, c.seed, mark, *(f"{float(x):.9g}" for x in row)])

    aside.replace(path)
