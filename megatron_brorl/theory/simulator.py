"""BroRL's token simulator (section 4.1): one softmax over 128,000 tokens, trained with N draws per step.

10,000 tokens are correct and have reward +1, the others have -1. Each step draws N tokens, subtracts the mean reward b
of the draws and makes an AdamW step on L = -(1/N) sum over draws of (R - b) p. docs/theory.md lists the choices that
the paper leaves open.

The columns `predicted_*` are the terms of Theorem 1 for one plain gradient step of size lr. The columns `moved_*` split
the first-order change of Q_pos by the optimizer's actual step into drawn and undrawn tokens. AdamW's step is linear in
its first moment, so this split is exact: the gradients of undrawn tokens have a first moment of their own.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from megatron_brorl.errors import UserError

Floats = npt.NDArray[Any]

PREDICTED = ("predicted_right", "predicted_wrong", "predicted_unsampled")
MOVED = ("moved_right", "moved_wrong", "moved_unsampled", "moved_decay")
COLUMNS = ("step", "q_pos", "improved_share", "worst_drop", "measured", *PREDICTED, *MOVED)

_BETA1 = 0.9
_BETA2 = 0.999
_CORRECT_LOGIT = 3.0  # initial logit of the correct tokens
_ANCHOR_LOGIT = 5.0  # initial logit of the first correct token


@dataclass(frozen=True)
class Settings:
    """Settings of a simulation. The paper gives the values of the fields up to `lr`."""

    vocabulary: int = field(default=128_000, metadata={"help": "tokens of the softmax"})
    correct: int = field(default=10_000, metadata={"help": "correct tokens, the first of the vocabulary"})
    steps: int = field(default=1000, metadata={"help": "optimizer steps"})
    lr: float = field(default=1e-3, metadata={"help": "learning rate"})
    # The gradients are about 1e-9, so that eps decides the step at small N.
    eps: float = field(default=1e-8, metadata={"help": "AdamW's eps"})
    weight_decay: float = field(default=0.01, metadata={"help": "AdamW's decoupled weight decay"})
    optimizer: Literal["adamw", "sgd"] = field(default="adamw", metadata={"help": "adamw or plain gradient steps"})

    def __post_init__(self) -> None:
        for name in ("vocabulary", "correct", "steps"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} = {getattr(self, name)}: must be at least 1")
        if self.correct >= self.vocabulary:
            raise UserError(f"correct = {self.correct}: must be less than vocabulary = {self.vocabulary}")
        for name in ("lr", "eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} = {getattr(self, name)}: must be a positive number")
        if not 0 <= self.weight_decay < math.inf:
            raise UserError(f"weight_decay = {self.weight_decay}: must not be negative")


@dataclass(frozen=True)
class Curves:
    """The record of one simulation. Row 0 is the start; row t is the state after step t and the change by that step."""

    n: int
    seed: int
    values: Floats  # [steps + 1, len(COLUMNS)] float64

    def column(self, name: str) -> Floats:
        """Return one of COLUMNS, [steps + 1]. measured, predicted_* and moved_* are changes of Q_pos by one step."""
        return self.values[:, COLUMNS.index(name)]

    def summary(self) -> dict[str, float]:
        """Return the values that `brorl simulate` prints; worst_drop is the minimum over all steps."""
        return {
            "q_pos_initial": float(self.column("q_pos")[0]),
            "q_pos_final": float(self.column("q_pos")[-1]),
            "improved_share": float(self.column("improved_share")[-1]),
            "worst_drop": float(self.column("worst_drop")[1:].min()),
        }


def simulate(n: int, seed: int, settings: Settings) -> Curves:
    """Run settings.steps steps with n draws each. Deterministic in its arguments."""
    if n < 1:
        raise UserError(f"N = {n}: must be at least 1")
    s = settings
    c = s.correct  # tokens 0 ... c - 1 are correct
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, n])))
    z = np.zeros(s.vocabulary)  # logits [V]
    z[:c] = _CORRECT_LOGIT
    z[0] = _ANCHOR_LOGIT
    p = _softmax(z)  # [V]
    initial = p[:c].copy()
    optimizer = _Optimizer(s)
    q = float(p[:c].sum(dtype=np.float64))  # Q_pos
    rows = np.zeros((s.steps + 1, len(COLUMNS)))
    rows[0, COLUMNS.index("q_pos")] = q

    for step in range(1, s.steps + 1):
        tokens, counts = _draw(p, n, rng)
        rewards = np.where(tokens < c, 1.0, -1.0)
        weights = counts * (rewards - float(counts @ rewards) / n)
        drawn = p[tokens]

        # The gradient of L is slope * p_j on every logit, plus `drawn_gradient` on the logits of drawn tokens.
        drawn_gradient = -weights * drawn / n
        slope = float(weights @ drawn) / n
        predicted = _terms(p, q, tokens, drawn_gradient, slope, s)
        moved = optimizer.step(z, p, q, tokens, drawn_gradient, slope)

        p = _softmax(z)
        new_q = float(p[:c].sum(dtype=np.float64))
        drop = float((p[:c] - initial).min())
        improved = float((p[:c] > initial).mean())
        rows[step] = (step, new_q, improved, drop, new_q - q, *predicted, *moved)

        q = new_q
    return Curves(n, seed, rows)


def _softmax(z: Floats) -> Floats:
    p = z - z.max()
    np.exp(p, out=p)
    p /= p.sum()
    return p


def _draw(p: Floats, n: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Draw n tokens from p [V]; return the distinct tokens in ascending order and the count of each."""
    edges = np.cumsum(p, dtype=np.float64)
    uniforms = np.sort(rng.random(n))  # sorted, because sorted lookups stay in the cache
    tokens = np.searchsorted(edges, uniforms * edges[-1], side="right")
    starts = np.flatnonzero(np.diff(tokens, prepend=-1))
    return tokens[starts], np.diff(starts, append=n)


def _terms(p: Floats, q: float, tokens: Floats, drawn_gradient: Floats, slope: float, s: Settings) -> tuple[float, ...]:
    """Return the parts of the change of Q_pos by one plain gradient step: drawn right, drawn wrong and undrawn."""
    c = s.correct
    drawn = p[tokens]
    right = tokens < c
    gain = drawn * np.where(right, 1 - q, -q) * -s.lr * (drawn_gradient + slope * drawn)
    square = drawn * drawn
    undrawn_right = float(p[:c] @ p[:c]) - float(square[right].sum())
    undrawn_wrong = float(p[c:] @ p[c:]) - float(square[~right].sum())
    unsampled = -s.lr * slope * ((1 - q) * undrawn_right - q * undrawn_wrong)
    return float(gain[right].sum()), float(gain[~right].sum()), unsampled


class _Optimizer:
    """AdamW as in torch.optim, or plain gradient descent, with the split of each step by drawn and undrawn tokens."""

    def __init__(self, s: Settings) -> None:
        self.s = s
        self.t = 0
        self.first, self.first_of_undrawn, self.second = (np.zeros(s.vocabulary) for _ in range(3))  # moments

    def step(
        self, z: Floats, p: Floats, q: float, tokens: Floats, drawn_gradient: Floats, slope: float
    ) -> tuple[float, float, float, float]:
        """Update z [V] in place and return the parts of the first-order change of Q_pos, in the order of MOVED."""
        s = self.s
        c = s.correct
        self.t += 1
        beta1, beta2 = (_BETA1, _BETA2) if s.optimizer == "adamw" else (0.0, 0.0)

        # Update the first moments of all gradients, and those of the gradients of undrawn tokens.
        gradient = slope * p  # [V]
        undrawn_gradient = (1 - beta1) * gradient
        undrawn_gradient[tokens] = 0
        self.first_of_undrawn *= beta1
        self.first_of_undrawn += undrawn_gradient
        gradient[tokens] += drawn_gradient
        self.first *= beta1
        self.first += (1 - beta1) * gradient

        # Decoupled weight decay changes Q_pos, too.
        decay = 0.0
        if s.weight_decay:
            shrink = s.lr * s.weight_decay
            pull = p * z
            decay = -shrink * ((1 - q) * float(pull[:c].sum()) - q * float(pull[c:].sum()))
            z *= 1 - shrink

        # `scale` is the step per unit of the first moment. It reuses the buffer of the gradient.
        if s.optimizer == "adamw":
            np.square(gradient, out=gradient)
            gradient *= 1 - beta2
            self.second *= beta2
            self.second += gradient
            scale = np.sqrt(self.second, out=gradient)
            scale /= math.sqrt(1 - beta2**self.t)
            scale += s.eps  # outside of the root, as in torch.optim.AdamW
            np.divide(-s.lr / (1 - beta1**self.t), scale, out=scale)
        else:
            scale = np.full_like(z, -s.lr)

        z += scale * self.first

        # Sum p dz over right and over wrong tokens, for the whole step and for its part from undrawn tokens.
        scale *= p
        right_and_wrong = slice(c), slice(c, None)
        right, wrong = (float(scale[members] @ self.first[members]) for members in right_and_wrong)
        undrawn_right, undrawn_wrong = (float(scale[m] @ self.first_of_undrawn[m]) for m in right_and_wrong)

        # To first order dQ_pos = (1 - Q) sum of p dz over right tokens - Q sum of p dz over wrong ones.
        undrawn = (1 - q) * undrawn_right - q * undrawn_wrong
        return (1 - q) * (right - undrawn_right), -q * (wrong - undrawn_wrong), undrawn, decay


def write_csv(path: Path, curves: Sequence[Curves], every: int) -> None:
    """Write one line per `every` steps of each simulation. Changes are summed over these steps."""
    first_change = COLUMNS.index("measured")  # Changes by a step are in this column and all after it.
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["N", "seed", *COLUMNS])
        for curve in curves:
            last_step = len(curve.values) - 1
            sums = np.cumsum(curve.values[:, first_change:], axis=0)
            steps = sorted({*range(0, last_step + 1, every), last_step})
            for step, previous in zip(steps, [0, *steps], strict=False):
                row = [*curve.values[step, 1:first_change], *(sums[step] - sums[previous])]
                writer.writerow([curve.n, curve.seed, step, *(f"{float(x):.9g}" for x in row)])
