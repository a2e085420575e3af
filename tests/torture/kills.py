"""Runs that are killed, stopped or refused by the disk at any moment, and started again: they end with the same bits.

    python tests/torture/kills.py --minutes 30 --seed 1

Each trial is a run of two ranks that is hurt once (hurt.py), and then started again until it ends. It must end with the
metrics and the weights of the run that nobody disturbed; what ends it in between is a signal or one line.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import forks
from e2e.runs import ENVIRONMENT, write_config
from torture import hurt

REPOSITORY = Path(__file__).parents[2]
RANKS = 2
SIZES = [
    "rollout.n=8", "rollout.prompts=4", "train.steps=4", "train.checkpoint_every=1", "train.keep_checkpoints=2",
    "evaluate.every=2", "evaluate.samples=1", "run.log=[]", "parallel.timeout_s=60", "reward.timeout_s=2",
]  # fmt: skip
STARTS = 4  # of a run that was hurt once, at most


@dataclass(frozen=True)
class Arena:
    """Where trials take place, and what they are held against."""

    root: Path
    config: Path
    model: Path

    def run(self, directory: Path, told: dict[str, object] | None = None) -> subprocess.CompletedProcess[str]:
        """One start of a run; told: how it is hurt."""
        words = ["train", "--processes", str(RANKS), str(self.config), f"model.path={self.model}"]
        words += [f"run.dir={directory}", *SIZES]
        if told is None:
            return forks.command_line(words, ENVIRONMENT, figures=False)
        return forks.command_line(words, {**ENVIRONMENT, hurt.KEY: json.dumps(told)}, main=hurt.main)


def arena(root: Path) -> Arena:
    """Rows and a random model."""
    config = write_config(root)
    options = ["--hidden", "32", "--layers", "2", "--heads", "2", "--kv-heads", "1", "--ffn", "64", "--context", "32"]
    done = forks.script(REPOSITORY / "tools" / "make_tiny_model.py", config, root / "model", *options)
    assert done.returncode == 0, done.stderr
    return Arena(root, config, root / "model")


def outcome(directory: Path) -> tuple[list[dict[str, object]], bytes]:
    """What a run came to: its figures without times, and its weights."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    figures = [{k: v for k, v in line.items() if k != "time"} for line in lines]
    return figures, (directory / "model" / "model.safetensors").read_bytes()


def trial(place: Arena, told: dict[str, object], expected: tuple[list[dict[str, object]], bytes]) -> tuple[str, str]:
    """(how the run that was hurt ended, what is wrong with where it came to)."""
    directory = place.root / "hurt"
    shutil.rmtree(directory, ignore_errors=True)
    done = place.run(directory, {**told, "under": str(directory)})
    first = _ended(done)

    # As a supervisor would: the same command, until it is through.
    for _ in range(STARTS):
        if done.returncode == 0:
            break
        done = place.run(directory)
    if done.returncode:
        return first, f"does not end: {done.returncode} {done.stderr[-2000:]}"

    # The same end, and nothing left lying about.
    figures, weights = outcome(directory)
    if "scoring" in str(told["do"]):
        return first, ""  # its answer is lost, and said to be: another run, which has to end
    if figures != expected[0]:
        return first, "other figures"
    if weights != expected[1]:
        return first, "other weights"
    left = [p.name for p in directory.rglob("*") if p.name.endswith(".writing") or p.name == "unfinished_step"]
    # A disk that refuses to remove a file keeps it.
    return first, f"left behind: {left}" if left and told["do"] not in hurt.FAULTS else ""


def _ended(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stderr.splitlines() if line.startswith("brorl: ")]
    if done.returncode == 0:
        return "went on"
    if done.returncode < 0:
        return f"died of signal {-done.returncode}"
    if done.returncode == 75:
        return "saved and left"
    told = lines and "Traceback" not in done.stderr
    return "one line" if told else f"exit {done.returncode}: {done.stderr[-3000:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--trials", type=int, default=10**9)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    args = parser.parse_args()
    rng, began = random.Random(args.seed), time.monotonic()
    os.environ.update(ENVIRONMENT)

    with tempfile.TemporaryDirectory(prefix="torture") as folder:
        # The run that nobody disturbs, and how often its processes touch files.
        place = arena(Path(folder))
        done = place.run(place.root / "whole")
        assert done.returncode == 0, done.stderr
        expected = outcome(place.root / "whole")
        events = [_events(place, rank) for rank in range(RANKS)]
        print(
            f"seed {args.seed}: {events} events of {RANKS} ranks in a run of {time.monotonic() - began:.0f} s",
            flush=True,
        )

        # Trials until the time is over.
        counts: collections.Counter[str] = collections.Counter()
        ends: collections.Counter[str] = collections.Counter()
        wrong = 0
        while time.monotonic() - began < 60 * args.minutes and sum(counts.values()) < args.trials:
            rank = rng.randrange(RANKS)
            what = rng.choice([*hurt.KILLS[:2], *hurt.KILLS, *hurt.FAULTS, *hurt.FAULTS])
            told: dict[str, object] = {"rank": rank, "at": rng.randint(1, events[rank]), "do": what}
            first, problem = trial(place, told, expected)
            counts[what] += 1
            ends[first.partition(":")[0]] += 1
            if problem or first.startswith("exit"):
                wrong += 1
                print(f"{json.dumps(told)}: {first}: {problem}", flush=True)
        print(", ".join(f"{n} {what}" for what, n in sorted(counts.items())))
        print(", ".join(f"{n} {end}" for end, n in sorted(ends.items())))
        print(f"{sum(counts.values())} trials, {wrong} wrong, {(time.monotonic() - began) / 60:.1f} minutes")
    return 1 if wrong else 0


def _events(place: Arena, rank: int) -> int:
    directory, log = place.root / "counted", place.root / "events"
    shutil.rmtree(directory, ignore_errors=True)
    done = place.run(directory, {"rank": rank, "at": -1, "do": "count", "under": str(directory), "log": str(log)})
    assert done.returncode == 0, done.stderr
    return int(log.read_text())


if __name__ == "__main__":
    sys.exit(main())
