"""Kill runs, or let the disk refuse, at any file operation; the restarted runs must end with the same bits.

    python tests/torture/trials.py --kills 60 --faults 60 --seed 1

Each trial is a run of two ranks, new or resumed, with one fault in one rank (faults.py). Then the same command is
started until it succeeds. Metrics, weights, summary and recorded rollouts must equal those of the undisturbed run. A
disk error must end in one line that names the file, and never in a traceback.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import forks
import pyarrow as pa
from e2e.runs import ENVIRONMENT, make_model, metric_lines, reward_letters, write_config
from torture import faults

from megatron_brorl import rollout_log

RANKS = 2
RESUMED = "resumed"
STAGES = ("from the beginning", RESUMED)
STARTS = 4  # maximum number of starts of a run after its fault
OPTIONS = [
    *("rollout.n=8", "rollout.prompts=4", "train.steps=3", "train.checkpoint_every=1", "train.keep_checkpoints=2"),
    *("evaluate.every=2", "evaluate.samples=1", "run.log=[]", "parallel.timeout_s=60", "theory.every=3"),
]
_TIMED = ("job_seconds", "peak_rss_mib")  # keys of summary.json
_FILES = {"metrics": "metrics.jsonl", "summary": "metrics.jsonl", "records": "rollouts"}  # the file behind each part


@dataclass(frozen=True)
class Outcome:
    """Parts of a finished run, without wall-clock values."""

    metrics: list[dict[str, Any]]
    summary: dict[str, Any]
    records: dict[str, tuple[pa.Table, pa.Table]]  # groups and rollouts by moment
    weights: bytes

    @classmethod
    def read(cls, directory: Path) -> Outcome:
        """Return the outcome of the run in a directory."""
        summary = json.loads((directory / "summary.json").read_text())
        folder = directory / rollout_log.FOLDER
        return cls(
            metrics=metric_lines(directory),
            summary={k: v for k, v in summary.items() if k not in _TIMED},
            records={
                str(entry): (rollout_log.read_groups(folder, entry), rollout_log.read_rollouts(folder, entry))
                for entry in rollout_log.entries(folder)
            },
            weights=(directory / "model" / "model.safetensors").read_bytes(),
        )

    def difference(self, directory: Path, messages: str, disk_fault: bool) -> str:
        """Return the parts that differ in another run, or the temporary files that it leaves; "" if there are none.

        messages: stderr of all its starts. A disk fault may cost a file that a warning names.
        """
        other = Outcome.read(directory)
        warned = [part for part, file in _FILES.items() if f"warning: {directory / file}:" in messages]
        differing = [part for part in vars(self) if getattr(self, part) != getattr(other, part)]
        wrong = [part for part in differing if not (disk_fault and part in warned)]
        if wrong:
            return f"other {', '.join(wrong)}"
        leftovers = [path.name for path in directory.rglob("*") if path.name.endswith((".writing", ".tmp"))]
        return f"left behind: {leftovers}" if leftovers and not disk_fault else ""


@dataclass
class Torture:
    """An undisturbed run in `root`, and trials that are compared with it."""

    root: Path
    words: list[str] = field(default_factory=list)  # arguments of `brorl train`
    operations: dict[tuple[str, int], dict[str, int]] = field(default_factory=dict)  # [stage, rank]["place: kind"]
    expected: Outcome | None = None

    def prepare(self) -> None:
        """Run once undisturbed, and once up to a kill in the second step."""
        config = write_config(self.root)
        model = self.root / "model"
        make_model(config, model)
        self.words = [str(config), f"model.path={model}", *reward_letters(config), *OPTIONS]

        undisturbed = self.root / "undisturbed"
        result = self.start(undisturbed)
        assert result.returncode == 0, result.stderr
        self.expected = Outcome.read(undisturbed)
        assert sum(line["updates"] for line in self.expected.metrics) > 1
        fault = {"rank": 0, "operation": "metrics.jsonl: write", "number": 2, "fault": faults.KILL}
        result = self.start(self.root / "killed", fault)
        assert result.returncode == -9, result.stderr

    def count(self) -> None:
        """Count the file operations of both stages."""
        for stage, rank in itertools.product(STAGES, range(RANKS)):
            directory = self.begin(stage)
            log = self.root / "log"
            result = self.start(directory, {"rank": rank, "log": str(log)})
            assert result.returncode == 0, result.stderr
            self.operations[stage, rank] = json.loads(log.read_text())

    def start(self, directory: Path, fault: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
        """Start the run once. A run that does not end in time has exit code 124."""
        words = ["train", "--processes", str(RANKS), *self.words, f"run.dir={directory}"]
        settings = {**fault, "folder": str(directory)} if fault else {}
        try:
            return forks.command_line(words, {**ENVIRONMENT, faults.KEY: json.dumps(settings)}, main=faults.main)
        except TimeoutError:
            return subprocess.CompletedProcess(words, 124, "", "does not end")

    def begin(self, stage: str) -> Path:
        """Return the run folder of a trial: a new path, or a copy of the folder of the killed run."""
        directory = self.root / "run"
        shutil.rmtree(directory, ignore_errors=True)
        if stage == RESUMED:
            shutil.copytree(self.root / "killed", directory)
        return directory

    def choose(self, rng: random.Random, fault: str) -> tuple[str, dict[str, Any]]:
        """Return a stage and a fault. All places in run.dir have the same probability."""
        stage = rng.choice(STAGES)
        rank = rng.randrange(RANKS)
        by_place = collections.defaultdict(list)
        for operation in sorted(self.operations[stage, rank]):
            place, _, kind = operation.partition(": ")
            if fault == faults.KILL or kind in faults.DISK[fault]:
                by_place[place].append(operation)
        operation = rng.choice(by_place[rng.choice(sorted(by_place))])
        number = rng.randint(1, self.operations[stage, rank][operation])
        lasting = fault != faults.KILL and rng.random() < 0.5
        return stage, {"rank": rank, "operation": operation, "number": number, "fault": fault, "lasting": lasting}

    def trial(self, stage: str, fault: dict[str, Any]) -> tuple[str, str]:
        """Start a run with a fault, then restart it until it ends.

        Returns how the first start ended, and a description of the problem, "" if there is none.
        """
        directory = self.begin(stage)
        result = self.start(directory, fault)
        end, problem = _ended(result, fault["fault"], directory)
        messages = result.stderr
        for _start in range(STARTS):
            if result.returncode == 0 or problem:
                break
            result = self.start(directory)
            messages += result.stderr
        if result.returncode and not problem:
            problem = f"does not end: {result.returncode} {result.stderr[-2000:]}"
        if not problem:
            assert self.expected
            problem = self.expected.difference(directory, messages, disk_fault=fault["fault"] in faults.DISK)
        return end, problem


def _ended(result: subprocess.CompletedProcess[str], fault: str, directory: Path) -> tuple[str, str]:
    """Return how a start with a fault ended, and a description of the problem, "" if there is none."""
    if "Traceback" in result.stderr or result.returncode == 124:
        return "wrong", result.stderr[-3000:]
    if "torture: " not in result.stderr:
        return "ended before the fault", "" if result.returncode == 0 else result.stderr[-2000:]
    if result.returncode == 0:
        return "continued with a warning" if re.search("^warning: ", result.stderr, re.M) else "continued", ""
    # The other rank may notice the death before the launcher does.
    if fault == faults.KILL and (result.returncode == -9 or "another rank has died" in result.stderr):
        return "killed", ""
    lines = [line for line in result.stderr.splitlines() if line.startswith("brorl: ")]
    reason = os.strerror(getattr(faults.errno, fault, 0))
    named = any(reason in line and str(directory) in line for line in lines)
    return "one line", "" if named else f"exit {result.returncode} names no file: {result.stderr[-2000:]}"


def main() -> int:
    """Run the trials and print how they ended; return 1 if any is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--faults", type=int, default=60, help="disk faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--again", type=json.loads, help="repeat a trial, given as it was printed")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    began = time.monotonic()
    wrong = 0
    kinds = [faults.KILL] * args.kills + [rng.choice(sorted(faults.DISK)) for _ in range(args.faults)]
    ends: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory(prefix="torture") as folder:
        torture = Torture(Path(folder))
        torture.prepare()
        torture.count()
        trials = [args.again] if args.again else [torture.choose(rng, kind) for kind in kinds]
        for number, (stage, fault) in enumerate(trials, start=1):
            end, problem = torture.trial(stage, fault)
            ends[f"{fault['fault']}: {end}"] += 1
            wrong += bool(problem)
            if problem:
                print(f"--again '{json.dumps([stage, fault])}': {end}: {problem}", flush=True)
            if number % 20 == 0:
                print(f"{number} trials, {(time.monotonic() - began) / 60:.0f} minutes", flush=True)
    print("; ".join(f"{count} {end}" for end, count in sorted(ends.items())))
    print(f"seed {args.seed}: {len(trials)} trials, {wrong} wrong, {(time.monotonic() - began) / 60:.1f} minutes")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
