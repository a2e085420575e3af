"""Runs that are killed, stopped, frozen or refused by the disk at any moment, and started again: they end with the same
bits.

    python tests/torture/kills.py --minutes 30 --seed 1

Each trial is a run of two ranks that is hurt once (hurt.py), from its beginning or when it is gone on with, and then
started again until it ends. It must end with the metrics, the weights, the summary and the records of the run
that nobody disturbed; what ends it in between is a signal or one line, and no process and no file of it is left behind.
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
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import forks
from e2e.runs import ENVIRONMENT, write_config
from torture import hurt, launching
from torture.outcome import Outcome, outcome

REPOSITORY = Path(__file__).parents[2]
DOUBLE = REPOSITORY / "tests" / "contract" / "double"
SIZES = [
    "rollout.n=8", "rollout.prompts=4", "train.steps=3", "train.checkpoint_every=1", "train.keep_checkpoints=2",
    "evaluate.every=2", "evaluate.samples=1", "run.log=[]", "parallel.timeout_s=60", "reward.timeout_s=2",
    "theory.every=3", "reward.strict=false",
    "reward.cut_off_factor=1.0",
]  # fmt: skip
# The model has learnt nothing: what it is rewarded for is something that it does now and then.
VERIFIER = "def letters(response, row):\n    return sum(c.isalpha() for c in response) / 6\n"
ENGINE = ["rollout.engine=trtllm", "engine.cuda_graphs=false", "engine.heartbeat_timeout_s=5"]
FROZEN = ["parallel.timeout_s=8", "rollout.timeout_s=8"]  # how long the others wait for one that never comes
STAGES = ("from the start", "gone on with")  # of a run, that is hurt
_HANGS = "run.progress_timeout_s"  # of the line that ends a run in which no rank comes further
STARTS = 4  # of a run that was hurt once, at most
# How often what is tried, in percent.
WEIGHTS = {
    **dict.fromkeys(hurt.FAULTS, 21), **dict(zip(hurt.RANK_KILLS, (14, 6), strict=True)),
    **dict(zip(hurt.LAUNCHER_KILLS, (4, 3), strict=True)), **dict(zip(hurt.FREEZES, (3, 1, 0.5), strict=True)),
    **dict(zip(hurt.SCORER_KILLS, (3, 1, 0.5), strict=True)), **dict(zip(hurt.ENGINE_KILLS, (0.7, 0.3), strict=True)),
}  # fmt: skip


@dataclass
class Arena:
    """A run as it is started again and again, and what it is held against."""

    root: Path
    words: list[str]  # of the command line
    environment: dict[str, str]
    ranks: int
    events: dict[tuple[str, int], collections.Counter[str]] = field(default_factory=dict)  # by stage and rank
    expected: Outcome | None = None

    def run(
        self, directory: Path, told: dict[str, Any] | None = None, options: list[str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """One start of a run; told: how it is hurt. One that does not end by itself is ended, with exit code 124."""
        words = ["train", "--processes", str(self.ranks), *self.words, f"run.dir={directory}", *(options or [])]
        try:
            return launching.command_line(words, {**self.environment, hurt.KEY: json.dumps(told or {})})
        except TimeoutError:
            return subprocess.CompletedProcess(words, 124, "", _HANGS)

    def prepare(self) -> None:
        """The run that nobody disturbs, and one that was killed in its second step."""
        self.root.mkdir(parents=True, exist_ok=True)
        whole = self.root / "whole"
        done = self.run(whole)
        assert done.returncode == 0, done.stderr
        self.expected = outcome(whole)
        assert sum(line["updates"] for line in self.expected.figures) > 1  # or all weights would be alike
        killed = {"rank": 0, "where": "phase: update", "at": 2, "do": "SIGKILL a rank", "under": str(whole)}
        done = self.run(self.root / "half", {**killed, "under": str(self.root / "half")})
        assert done.returncode == 137, done.stderr

    def count(self) -> None:
        """What the ranks of both do."""
        for stage, rank in itertools.product(STAGES, range(self.ranks)):
            directory, log = self.begin(stage), self.root / "log"
            done = self.run(directory, {"rank": rank, "do": "count", "under": str(directory), "log": str(log)})
            assert done.returncode == 0, done.stderr
            self.events[stage, rank] = collections.Counter(json.loads(log.read_text()))

    def begin(self, stage: str) -> Path:
        """A run's folder as it is when a start is hurt."""
        directory = self.root / "hurt"
        shutil.rmtree(directory, ignore_errors=True)
        if stage == STAGES[1]:
            shutil.copytree(self.root / "half", directory)
        return directory


def arena(root: Path, engine: bool = False) -> Arena:
    """Rows and a random model; engine: with one rank, whose rollouts come from an engine process."""
    config, model = write_config(root), root / "model"
    options = ["--hidden", "32", "--layers", "2", "--heads", "2", "--kv-heads", "1", "--ffn", "64", "--context", "32"]
    if not model.exists():
        done = forks.script(REPOSITORY / "tools" / "make_tiny_model.py", config, model, *options)
        assert done.returncode == 0, done.stderr
    (root / "letters.py").write_text(VERIFIER)
    words = [str(config), f"model.path={model}", f"data.verifier={root / 'letters.py'}:letters", *SIZES]
    if not engine:
        return Arena(root / "plain", words, ENVIRONMENT, 2)
    return Arena(root / "engine", [*words, *ENGINE], {**ENVIRONMENT, "PYTHONPATH": str(DOUBLE)}, 1)


@dataclass(frozen=True)
class Trial:
    """What is done to a run, and what came of it."""

    what: str
    stage: str
    where: str
    end: str  # of the start that was hurt
    problem: str  # "" where all is well


def trial(place: Arena, what: str, stage: str, told: dict[str, Any]) -> Trial:
    """Hurt a run once, and start it again until it is through."""
    directory, flag = place.begin(stage), place.root / "flag"
    flag.unlink(missing_ok=True)
    frozen = what == "freeze a rank"
    asked = {**told, "do": what, "under": str(directory), "flag": str(flag)}
    before = launching.running()
    done = place.run(directory, asked, FROZEN if frozen else [])
    end, problem = _ended(done, what, directory)
    said = done.stderr
    if left := launching.left_behind(before):
        problem = problem or f"left running: {left}"

    # As a supervisor would: the same command, until it is through.
    flag.unlink(missing_ok=True)
    for _ in range(STARTS):
        if done.returncode == 0 or problem:
            break
        done = place.run(directory)
        said += done.stderr
    if done.returncode and not problem:
        problem = f"does not end: {done.returncode} {done.stderr[-2000:]}"

    # The same end, and nothing left lying about.
    if not problem:
        assert place.expected
        problem = place.expected.against(directory, what, said, exact=place.ranks > 1)
    if not problem and what in hurt.ENGINE_KILLS and (left := launching.shared_memory()):
        problem = f"left in shared memory: {left}"
    return Trial(what, stage, told["where"], end, problem)


def _ended(done: subprocess.CompletedProcess[str], what: str, directory: Path) -> tuple[str, str]:
    """How a start that was hurt ended, and what is wrong with that."""
    if "Traceback" in done.stderr:
        return "traceback", done.stderr[-3000:]
    if done.returncode == 124 or (_HANGS in done.stderr and what != "freeze a rank"):  # which may end so
        stacks = "\n".join(path.read_text()[-3000:] for path in directory.glob("stacks/*"))
        return "hangs", f"{done.stderr[-1000:]}\n{stacks}"
    hit = "torture: " in done.stderr and "nobody there" not in done.stderr
    if done.returncode == 0:
        if what not in hurt.FAULTS:
            return "went on" if hit else "was over before", ""
        told = re.search("^warning: ", done.stderr, re.M)
        return "was over before" if not hit else "went on, told" if told else "went on", ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("brorl: ")]
    if done.returncode == -9 and "launcher" in what:
        return "killed", ""
    if done.returncode == 75 and "SIGTERM" in what:
        return "saved and left", ""
    if not lines:
        return f"exit {done.returncode}", f"no line: {done.stderr[-3000:]}"
    if done.returncode == 137 and what == "SIGKILL a rank":
        return "killed", ""
    if what not in hurt.FAULTS:
        return "one line", ""

    # What the disk refused, and where.
    why = os.strerror(getattr(hurt.errno, what))
    named = [line for line in lines if why in line and str(directory) in line]
    return "one line", "" if named else f"does not say what and where: {lines}"


def choose(rng: random.Random, plain: Arena, engine: Arena | None) -> tuple[Arena, str, str, dict[str, Any]]:
    """The next trial: every place of a run as likely as any other."""
    what = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    place = plain
    if what in hurt.ENGINE_KILLS:
        assert engine
        place = engine
    stage, rank = rng.choice(STAGES), rng.randrange(place.ranks)
    possible = collections.defaultdict(list)
    for where in sorted(place.events[stage, rank]):
        folder, _, name = where.partition(": ")
        if name in hurt.FAULTS[what] if what in hurt.FAULTS else True:
            possible[folder].append(where)
    by_sampling = "scoring" in what or "engine" in what
    where = rng.choice(possible[hurt.PHASE if by_sampling else rng.choice(sorted(possible))])
    told: dict[str, Any] = {"rank": rank, "where": where, "at": rng.randint(1, place.events[stage, rank][where])}
    if what in hurt.FAULTS:
        told["lasting"] = rng.random() < 0.5
    return place, what, stage, told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--trials", type=int, default=10**9)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--lanes", type=int, default=os.cpu_count() or 1, help="processes, each with trials of its own")
    parser.add_argument("--only", help="a word of what is tried")
    parser.add_argument("--again", type=json.loads, help="a trial that failed, as it was printed")
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)  # of a lane, for its trials
    args = parser.parse_args()
    if args.only:
        for what in WEIGHTS:
            WEIGHTS[what] *= args.only in what

    # A run waits now and then, for a rank that is gone or a scorer: what another lane does meanwhile.
    began = time.monotonic()
    if args.lanes > 1 and not args.again and not args.file:
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / str(lane) for lane in range(args.lanes)]
            own = [["--lanes=1", f"--seed={args.seed + lane}", f"--file={file}"] for lane, file in enumerate(files)]
            lanes = [subprocess.Popen([sys.executable, "-W", "ignore", *sys.argv, *words]) for words in own]
            failed = sum(lane.wait() != 0 for lane in lanes)
            trials = [Trial(*found) for file in files if file.exists() for found in json.loads(file.read_text())]
    else:
        trials, failed = attack(args, began), 0
    if args.file:
        args.file.write_text(json.dumps([astuple(trial) for trial in trials]))
        return 0
    wrong = report(trials)
    print(f"{len(trials)} trials, {wrong} wrong, {(time.monotonic() - began) / 60:.1f} minutes")
    return 1 if wrong or failed else 0


def attack(args: argparse.Namespace, began: float) -> list[Trial]:
    """Trials until the time is over."""
    rng = random.Random(args.seed)
    os.environ.update(ENVIRONMENT)
    trials: list[Trial] = []
    with tempfile.TemporaryDirectory(prefix="torture") as folder, launching.adopting():
        plain, engine = arena(Path(folder)), None
        if any(WEIGHTS[what] for what in hurt.ENGINE_KILLS):
            engine = arena(Path(folder), engine=True)
        for made in filter(None, (plain, engine)):
            made.prepare()
            made.count()
        events = {f"{stage}, rank {rank}": sum(found.values()) for (stage, rank), found in plain.events.items()}
        print(f"seed {args.seed}: events {events}, {time.monotonic() - began:.0f} s", flush=True)

        while time.monotonic() - began < 60 * args.minutes and len(trials) < args.trials:
            place, what, stage, told = choose(rng, plain, engine)
            if args.again:
                what, stage, told = args.again
                place, args.trials = (engine or plain) if what in hurt.ENGINE_KILLS else plain, 1
            trials.append(trial(place, what, stage, told))
            if len(trials) % 50 == 0:
                print(f"seed {args.seed}: {len(trials)} trials, {(time.monotonic() - began) / 60:.0f} min", flush=True)
            if trials[-1].problem:
                again = json.dumps([what, stage, told])
                print(f"--again '{again}': {trials[-1].end}: {trials[-1].problem}", flush=True)
    return trials


def report(trials: list[Trial]) -> int:
    """Counts of what was done, where, and how it ended; how many are wrong."""
    for what in WEIGHTS:
        own = [t for t in trials if t.what == what]
        places = collections.Counter(t.where.partition(": ")[0] for t in own)
        ends = collections.Counter(t.end for t in own)
        listed = ("; ".join(f"{n} {name}" for name, n in found.most_common()) for found in (ends, places))
        if own:
            print(f"{len(own)} {what}: ", " | ".join(listed))
    silent = [t for t in trials if t.what in hurt.FAULTS and t.end == "went on"]
    named = collections.Counter(f"{t.what} at {t.where}" for t in silent).most_common()
    print("not told:", ", ".join(f"{n} {name}" for name, n in named))
    return sum(bool(t.problem) for t in trials)


if __name__ == "__main__":
    sys.exit(main())
