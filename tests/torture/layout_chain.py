"""A run that goes on in another layout after every step, and is killed on the way: it ends as one process would have.

    python tests/torture/layout_chain.py --chains 5 --seed 1

What is promised: every rollout of every step is the same, token by token, with the same reward; figures and weights are
the same but for floating-point order, which sums over other ranks in another one (weights to 1e-5 of a tensor's norm).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import forks
import pytest
from dist.test_steps import OF_LAYOUT, ROUNDED
from e2e.runs import ENVIRONMENT, write_config
from safetensors.torch import load_file
from torture import hurt, launching
from torture.kills import REPOSITORY, VERIFIER

from megatron_brorl.record import files as records

SIZES = [
    "rollout.n=8", "rollout.prompts=3", "train.checkpoint_every=1", "evaluate.every=0", "evaluate.samples=1",
    "run.log=[]", "parallel.timeout_s=60", "reward.strict=false", "reward.cut_off_factor=1.0", "run.record_groups=8",
    # Adam's eps well above float32 noise, so that layouts can be compared.
    "optim.lr=2e-3", "optim.eps=1e-3",
]  # fmt: skip
# In a step of a rank of any layout.
MOMENTS = ["phase: collect", "phase: rollout", "unfinished_step: write", "phase: update", "phase: optimizer step",
           "phase: refit", "phase: checkpoint", "checkpoints: write", "checkpoints: rename"]  # fmt: skip


class Leg(NamedTuple):
    """A layout that a run goes on in."""

    name: str
    ranks: int
    options: tuple[str, ...] = ()


LEGS = (
    Leg("2 ranks", 2),
    Leg("1 rank", 1),
    Leg("4 ranks", 4),
    Leg("TP2", 2, ("parallel.tensor=2",)),
    Leg("PP2", 2, ("parallel.pipeline=2",)),
    Leg("CP2", 2, ("parallel.context=2", "train.share_prompt=false")),
    Leg("TP2 x PP2", 4, ("parallel.tensor=2", "parallel.pipeline=2")),
)


class Chains:
    """A model with rows, and the runs from it."""

    def __init__(self, root: Path) -> None:
        self.root, config = root, write_config(root)
        shape = ["--hidden", "32", "--layers", "2", "--heads", "4", "--kv-heads", "2", "--ffn", "64", "--context", "32"]
        done = forks.script(REPOSITORY / "tools" / "make_tiny_model.py", config, root / "model", *shape)
        assert done.returncode == 0, done.stderr
        (root / "letters.py").write_text(VERIFIER)
        verifier = f"data.verifier={root / 'letters.py'}:letters"
        self.words = [str(config), f"model.path={root / 'model'}", verifier, *SIZES]

    def whole(self, steps: int) -> Path:
        """What one process makes of so many steps."""
        directory = self.root / f"whole_{steps}"
        if not directory.exists():
            done = self._go_on(directory, LEGS[1], steps)
            assert done.returncode == 0, done.stderr
            assert sum(line["updates"] for line in _figures(directory)) >= steps
        return directory

    def run(self, legs: Sequence[Leg], kills: Sequence[dict[str, Any]]) -> tuple[Path, int]:
        """A step in each layout; returns how many were killed. kills: how each leg is hurt first, {}: not."""
        directory, killed = self.root / "chain", 0
        shutil.rmtree(directory, ignore_errors=True)
        for number, (leg, told) in enumerate(zip(legs, kills, strict=True), start=1):
            if told:
                asked = {**told, "do": "SIGKILL a rank", "under": str(directory)}
                done = self._go_on(directory, leg, number, asked)
                killed += done.returncode == 137
                assert done.returncode in (0, 137), (leg.name, told, done.stderr)
            done = self._go_on(directory, leg, number)
            assert done.returncode == 0, (leg.name, told, done.stderr)
        return directory, killed

    def _go_on(
        self, directory: Path, leg: Leg, steps: int, told: dict[str, Any] | None = None
    ) -> subprocess.CompletedProcess[str]:
        words = ["train", "--processes", str(leg.ranks), *self.words, *leg.options]
        words += [f"train.steps={steps}", f"run.dir={directory}"]
        return launching.command_line(words, {**ENVIRONMENT, hurt.KEY: json.dumps(told or {})})


def differs(whole: Path, chain: Path) -> str:
    """What is not as promised, or ""."""
    # Rollouts, token by token.
    ours, theirs = whole / records.FOLDER, chain / records.FOLDER
    # Every leg ends with an evaluation of its own, which is no part of the run.
    steps = [m for m in records.moments(ours) if m.kind == "step"]
    if [m for m in records.moments(theirs) if m.kind == "step"] != steps:
        return f"other moments: {records.moments(theirs)}"
    for moment in steps:
        a, b = records.read_rollouts(ours, moment), records.read_rollouts(theirs, moment)
        for column in ("prompt_id", "sibling", "token_ids", "reward"):
            if not a[column].equals(b[column]):
                return f"{moment}: other {column}"

    # Figures: counts alike, sums but for their order.
    for x, y in zip(_figures(whole), _figures(chain), strict=True):
        if x.keys() != y.keys():
            return f"step {x['step']}: other figures: {x.keys() ^ y.keys()}"
        for name in x.keys() - OF_LAYOUT:
            rounded = name in ROUNDED or name.startswith("theory_")
            near = {"rel": 1e-4, "abs": 1e-4} if rounded else {"rel": 0, "abs": 0}
            if x[name] != y[name] and (not rounded or x[name] != pytest.approx(y[name], nan_ok=True, **near)):
                return f"step {x['step']}: {name} is {y[name]}, not {x[name]}"

    # Weights.
    expected, got = (load_file(d / "model" / "model.safetensors") for d in (whole, chain))
    far = {n: float((got[n] - t).norm() / t.norm()) for n, t in expected.items()}
    worst = max(far, key=lambda n: far[n])
    return f"{worst} is {far[worst]:.1e} of its norm away" if far[worst] > 1e-5 else ""


def _figures(directory: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "time"} for line in lines]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chains", type=int, default=5)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    args = parser.parse_args()
    rng, began = random.Random(args.seed), time.monotonic()
    os.environ.update(ENVIRONMENT)
    wrong = kills = 0
    with tempfile.TemporaryDirectory(prefix="torture") as folder:
        chains = Chains(Path(folder))
        for number in range(args.chains):
            # The first one in the order above, the others in any.
            legs = LEGS if not number else rng.choices(LEGS, k=len(LEGS))
            told = [{"rank": rng.randrange(leg.ranks), "where": rng.choice(MOMENTS), "at": 1} for leg in legs]
            directory, killed = chains.run(legs, told)
            kills += killed
            names, problem = " -> ".join(leg.name for leg in legs), differs(chains.whole(len(legs)), directory)
            wrong += bool(problem)
            print(f"{names}: {killed} kills{f': {problem}' if problem else ''}", flush=True)
    minutes = (time.monotonic() - began) / 60
    print(f"seed {args.seed}: {args.chains} chains, {kills} kills, {wrong} wrong, {minutes:.1f} minutes")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
