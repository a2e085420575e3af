"""Run a study that is declared in a TOML file, and write its page.

Usage: python tools/study.py DESIGN.toml DIRECTORY [--jobs J] [--plan | --page]

A design compares arms: settings of one `brorl train` configuration, each run with the same seeds. It is hashed before
the first run, and a directory takes the runs of one design only. The same command continues a study that was stopped.
An arm can start from the model that another arm has trained. "{seed}" in a setting is the run's seed, so that each
seed can have its own data. With a [tuning] table, every arm first tries each learning rate on the seeds of this table,
and keeps the rate whose curves have the largest mean height.

DIRECTORY gets design.json, runs/, results.parquet, page.md and curves.png. tools/study_example.toml is an example;
`pip install 'megatron-brorl[study]'` installs what this file imports.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import hashlib
import json
import math
import os
import queue
import random
import shutil
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from scipy import stats
from scipy.integrate import trapezoid
from statsmodels.stats.multitest import multipletests

from megatron_brorl.config.load import load
from megatron_brorl.errors import UserError
from megatron_brorl.report.content import SUMMARY, checkpoints, evaluations, read_run

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FAILED = "failed.txt"  # in the directory of a tuning run whose weights stopped being finite
DIVERGED = "steps in a row skipped an update"  # in the error of such a run


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Arm(_Table):
    """Settings that are compared with those of other arms."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    settings: dict[str, Any] = {}  # section.key -> value
    start: str = ""  # the arm whose trained model this one starts from; "" is model.path
    rate_of: str = ""  # the arm whose learning rate this one takes; "" tunes its own where there is a tuning
    seconds: float = Field(0, ge=0)  # time budget of training steps, without evaluations; 0 means no limit
    rollouts: int = Field(0, ge=0)  # budget of sampled rollouts; 0 means no limit


class Tuning(_Table):
    """Learning rates that every arm tries on seeds that the comparisons do not use."""

    seeds: tuple[int, ...] = Field(min_length=1)
    rates: tuple[float, ...] = Field(min_length=1)


class Comparison(_Table):
    """A difference between two arms, paired by seed."""

    claim: str
    before: str
    after: str
    over: Literal["seconds", "rollouts"] = "seconds"
    # The curve's value at the end, its mean height up to there, or the seconds (or rollouts) until it reaches `target`.
    end_point: Literal["final", "mean", "reached"] = "final"
    target: float = Field(0.5, gt=0, le=1)
    metric: str = Field("pass_at_1", pattern=r"^pass_at_[0-9]+$")
    seeds: tuple[int, ...] = ()  # () are all seeds of the design


class Design(_Table):
    """The declaration of a study."""

    name: str
    question: str
    config: str  # TOML file of `brorl train`, relative to the current directory
    processes: int = Field(1, ge=1)
    seeds: tuple[int, ...] = Field(min_length=1)
    level: float = Field(0.05, gt=0, lt=1)  # significance level of all comparisons together
    settings: dict[str, Any] = {}  # settings of all arms
    tuning: Tuning | None = None
    arms: tuple[Arm, ...] = Field(min_length=1)
    comparisons: tuple[Comparison, ...] = ()

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)


@dataclass(frozen=True)
class Run:
    """One call of `brorl train`."""

    arm: str
    seed: int
    rate: float | None  # None is the configuration's own
    phase: Literal["tune", "test"]

    @property
    def name(self) -> str:
        return f"{self.arm}-seed{self.seed}" + ("" if self.rate is None else f"-lr{self.rate:g}")


def read_design(path: Path) -> Design:
    """Read and check a design. Raises UserError with the file, the key and the problem."""
    try:
        design = Design(**tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, tomllib.TOMLDecodeError) as e:
        raise UserError(f"{path}: cannot be read as TOML: {e}") from None
    except ValidationError as e:
        first = e.errors()[0]
        raise UserError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    check(design, str(path))
    return design


def check(design: Design, where: str) -> None:
    """Check that the keys are consistent. Raises UserError."""
    arm_names: list[str] = []
    for arm in design.arms:
        if arm.name in arm_names:
            raise UserError(f"{where}: arms: two are named {arm.name}; names must differ")
        for key in ("start", "rate_of"):
            if (other := getattr(arm, key)) and other not in arm_names:
                raise UserError(f"{where}: arm {arm.name}: {key} = {other!r}: name an arm that is declared above it")
        if not (arm.seconds or arm.rollouts):
            raise UserError(f"{where}: arm {arm.name}: has no budget; give seconds or rollouts")
        arm_names.append(arm.name)
    for c in design.comparisons:
        if unknown := {c.before, c.after} - set(arm_names):
            raise UserError(f"{where}: comparison {c.claim!r}: no arm is named {unknown.pop()}")
    if design.tuning and set(design.tuning.seeds) & set(design.seeds):
        raise UserError(
            f"{where}: tuning.seeds: must differ from seeds, because otherwise rates are chosen by the result"
        )


class Study:
    """The runs of a design in a directory."""

    def __init__(self, design: Design, directory: Path, jobs: int = 1) -> None:
        self.design = design
        self.directory = directory
        self.jobs = jobs  # runs at a time
        self._cores: queue.SimpleQueue[str] = queue.SimpleQueue()  # the cores of each job that is not running
        for job in range(jobs):
            self._cores.put(",".join(map(str, sorted(os.sched_getaffinity(0))[job::jobs])))
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # one per run
        # Load all configurations here, so that an invalid setting fails before the first run. The hash covers them too.
        configs = {arm.name: load(design.config, self._settings(arm)) for arm in design.arms}
        declared = {"design": design.model_dump(), "configs": {k: dataclasses.asdict(c) for k, c in configs.items()}}
        self.declared = json.dumps(declared, indent=1, sort_keys=True, default=str)
        self.sha256 = hashlib.sha256(self.declared.encode()).hexdigest()

    def write_design(self) -> None:
        """Write design.json before the first run. Raises UserError if the directory has another design."""
        path = self.directory / "design.json"
        if not path.exists():
            self.directory.mkdir(parents=True, exist_ok=True)
            path.write_text(self.declared, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != self.declared:
            raise UserError(f"{path}: the design has changed since its first run; give the new one another directory")

    def execute(self) -> None:
        """Start all runs that are not finished. Raises UserError if one fails."""
        self._make_all(run for arm in self.design.arms for run in self._tuning_runs(arm))
        # Shuffle the arms within each seed, so that slow changes of the machine do not favor one arm.
        order = random.Random(self.sha256)
        arms = self.design.arms
        shuffled = [(arm, seed) for seed in self.design.seeds for arm in order.sample(arms, len(arms))]
        self._make_all(self.test_run(arm, seed) for arm, seed in shuffled)

    def _make_all(self, runs: Iterable[Run]) -> None:
        with ThreadPoolExecutor(self.jobs) as pool:
            # In the order of completion, so that a failure starts no more runs.
            for result in as_completed([pool.submit(self._make, run) for run in runs]):
                try:
                    result.result()
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise

    def runs(self) -> list[Run]:
        """Return the finished runs."""
        tuned = [run for arm in self.design.arms for run in self._tuning_runs(arm)]
        if not all(map(self._done, tuned)):
            return [run for run in tuned if self._done(run)]
        tests = [self.test_run(arm, seed) for seed in self.design.seeds for arm in self.design.arms]
        return tuned + [run for run in tests if self._done(run)]

    def test_run(self, arm: Arm, seed: int) -> Run:
        """Return the run of an arm with a seed of the comparisons."""
        return Run(arm.name, seed, self.rate(arm), "test")

    def rate(self, arm: Arm) -> float | None:
        """Return the learning rate of an arm for the comparisons. Raises UserError if all tuning runs diverged."""
        if arm.rate_of:
            return self.rate(self.design.arm(arm.rate_of))
        if not self.design.tuning:
            return None
        scores: dict[float, list[float]] = {}
        for run in self._tuning_runs(arm):
            points = self.points(run)
            height = mean_height(points.seconds.to_list(), points.pass_at_1.to_list()) if len(points) > 1 else -math.inf
            scores.setdefault(run.rate or 0.0, []).append(height)
        best = max(scores, key=lambda rate: (sum(scores[rate]), -rate))  # of equal ones the lowest rate
        if sum(scores[best]) == -math.inf:
            raise UserError(f"arm {arm.name}: all runs of tuning.rates diverged; declare lower rates")
        return best

    def points(self, run: Run) -> pd.DataFrame:
        """Return one row per held-out evaluation, or an empty table if the run diverged."""
        folder = self._folder(run)
        if (folder / FAILED).exists():
            return pd.DataFrame()
        recorded = read_run(folder)
        rows = checkpoints(recorded, evaluations(recorded))
        pass_rates = [{f"pass_at_{p['k']}": p["mean"] for p in row.pop("passes")} for row in rows]
        return pd.DataFrame([row | row_rates for row, row_rates in zip(rows, pass_rates, strict=True)])

    def table(self) -> pd.DataFrame:
        """Return the results of all finished runs, one row per run and evaluation."""
        parts = [
            self.points(run).assign(run=run.name, arm=run.arm, seed=run.seed, rate=run.rate, phase=run.phase)
            for run in self.runs()
        ]
        if not any(len(part) for part in parts):
            raise UserError(f"{self.directory}: no run is finished; start the command without --page")
        return pd.concat(parts, ignore_index=True).assign(design_sha256=self.sha256)

    def _settings(self, arm: Arm) -> list[str]:
        """Return the overrides of an arm. Its budget becomes train.steps and train.max_seconds."""
        settings = self.design.settings | arm.settings | {"train.max_seconds": arm.seconds}
        overrides = [f"{k}={value if isinstance(value, str) else json.dumps(value)}" for k, value in settings.items()]
        if not arm.rollouts:
            return [*overrides, "train.steps=1000000"]
        rollout = load(self.design.config, overrides).rollout
        return [*overrides, f"train.steps={math.ceil(arm.rollouts / (rollout.n * rollout.prompts))}"]

    def _tuning_runs(self, arm: Arm) -> list[Run]:
        tuning = self.design.tuning
        if not tuning or arm.rate_of:
            return []
        return [Run(arm.name, seed, rate, "tune") for seed in tuning.seeds for rate in tuning.rates]

    def _make(self, run: Run) -> None:
        """Run `brorl train` unless the run is finished. A stopped run continues from its last checkpoint."""
        with self._locks[run.name]:
            if not self._done(run):
                self._train(run)

    def _train(self, run: Run) -> None:
        arm = self.design.arm(run.arm)
        folder = self._folder(run)
        run_settings = [f"run.seed={run.seed}", f"run.dir={folder}"]
        if run.rate is not None:
            run_settings.append(f"optim.lr={run.rate!r}")
        if arm.start:
            start_arm = self.design.arm(arm.start)
            parent = Run(start_arm.name, run.seed, self.rate(start_arm), run.phase)
            self._make(parent)
            run_settings.append(f"model.path={self._folder(parent) / 'model'}")
        folder.mkdir(parents=True, exist_ok=True)
        settings = [setting.replace("{seed}", str(run.seed)) for setting in self._settings(arm)]
        train = [sys.executable, "-m", "megatron_brorl", "train", "--processes", str(self.design.processes)]
        log = folder / "log.txt"
        print(f"{run.phase}: {run.name}", flush=True)
        cores = self._cores.get()
        try:
            with open(log, "a", encoding="utf-8") as out:
                command = ["taskset", "-c", cores, *train, self.design.config, *settings, *run_settings]
                status = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT).returncode
        finally:
            self._cores.put(cores)
        if status:
            last = next(filter(None, reversed(log.read_text(encoding="utf-8").splitlines())), f"exit code {status}")
            if run.phase == "test" or DIVERGED not in last:
                raise UserError(f"{run.name}: {last} ({log}); run the same command again to continue")
            (folder / FAILED).write_text(last, encoding="utf-8")
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # a study of large models would fill the disk

    def _folder(self, run: Run) -> Path:
        return (self.directory / "runs" / run.name).absolute()

    def _done(self, run: Run) -> bool:
        return any((self._folder(run) / name).exists() for name in (SUMMARY, FAILED))


def mean_height(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the mean height of a curve that is linear between its points."""
    return float(trapezoid(y, x) / (x[-1] - x[0]))


def differences(c: Comparison, table: pd.DataFrame) -> dict[int, float]:
    """Return after - before by seed. Both curves are evaluated up to the end of the shorter one.

    For end_point = "reached", a curve that does not reach the target counts as reaching it at that end.
    """
    result = {}
    runs = table[table.phase == "test"].dropna(subset=[c.metric]).groupby(["arm", "seed"])
    curves = {key: (group[c.over].to_numpy(), group[c.metric].to_numpy()) for key, group in runs}
    for seed in sorted(set(c.seeds or table.seed)):
        pair = [curves[key] for arm in (c.before, c.after) if (key := (arm, seed)) in curves]
        if len(pair) == 2:
            end = min(x[-1] for x, _ in pair)
            before, after = (_end_point(c, x, y, end) for x, y in pair)
            result[seed] = after - before
    return result


def _end_point(c: Comparison, x: Any, y: Any, end: float) -> float:
    if c.end_point == "reached":
        return float(min([end, *x[y >= c.target]]))
    last = float(np.interp(end, x, y))
    inside = x < end
    return last if c.end_point == "final" else mean_height([*x[inside], end], [*y[inside], last])


def infer(design: Design, table: pd.DataFrame) -> pd.DataFrame:
    """Return each comparison's difference, its interval, and p-values before and after Holm's correction.

    The unit is the run: the mean and Student's paired test over seeds. Times until a target are censored, so they have
    the median and the sign test, without ties. A comparison with fewer than two pairs counts with p = 1.
    """
    rows = []
    for c in design.comparisons:
        by_seed = differences(c, table)
        values = np.array([*by_seed.values()])
        row = {"claim": c.claim, "pairs": len(values), "by seed": by_seed, "difference": np.nan, "p": 1.0}
        reached = c.end_point == "reached"
        if len(values):
            row["difference"] = float(np.median(values) if reached else np.mean(values))
        if len(values) > 1:
            test = stats.quantile_test(values) if reached else stats.ttest_1samp(values, 0)
            row["low"], row["high"] = test.confidence_interval(1 - design.level)
            # Both tests are undefined if all differences are 0. They show no effect, so p is 1.
            if values.any():
                sign = stats.binomtest((values > 0).sum(), (values != 0).sum())
                row["p"] = sign.pvalue if reached else test.pvalue
        rows.append(row)
    columns = ["claim", "pairs", "by seed", "difference", "low", "high", "p"]
    inferred = pd.DataFrame(rows, columns=columns)
    return inferred.assign(holm=multipletests(inferred.p, method="holm")[1] if rows else [])


def write_page(study: Study) -> Path:
    """Write results.parquet, curves.png and page.md; return the path of page.md."""
    design = study.design
    table = study.table()
    table.to_parquet(study.directory / "results.parquet")
    draw(design, table).savefig(study.directory / "curves.png", dpi=110)
    start = read_run(study.directory / "runs" / table.run.iloc[0]).starts[-1]
    versions = ", ".join(f"{name} {version}" for name, version in start["versions"].items())
    sections = [
        f"# {design.name}: {design.question}",
        f"{table.run.nunique()} runs, design sha256 `{study.sha256}`, commit `{_commit()}`. "
        f"{start['machine']['system']}, {start['machine']['cores']} cores, {start['machine']['device']}, "
        f"{design.processes} processes; {versions}. Seconds are those of training steps; evaluations are not counted.",
        "## Comparisons\n\nPaired by seed; both curves are evaluated up to the end of the shorter one. Intervals of "
        f"{1 - design.level:.0%} and p-values are of Student's paired test. Times until a target "
        "is reached have the median and the sign test. Holm's correction covers all comparisons.",
        _markdown(_shown(design, infer(design, table))),
        "![Held-out pass@1 of every run, and the mean of each arm](curves.png)",
        "## Runs\n\nThe last evaluation of every run.",
        _markdown(table.groupby("run", sort=False).last().reset_index().drop(columns=["arm", "design_sha256"])),
    ]
    page = study.directory / "page.md"
    page.write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    return page


def draw(design: Design, table: pd.DataFrame) -> Figure:
    """Draw pass@1 over seconds and over rollouts: runs as thin lines, the mean of each arm as a thick one."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    tests = table[table.phase == "test"]
    for axes, over in zip(figure.subplots(1, 2, sharey=True), ("seconds", "rollouts"), strict=True):
        for i, arm in enumerate(design.arms):
            arm_runs = [group.sort_values(over) for _, group in tests[tests.arm == arm.name].groupby("run")]
            for group in arm_runs:
                axes.plot(group[over], group.pass_at_1, color=f"C{i}", alpha=0.3, linewidth=0.8)
            if arm_runs:
                x = np.linspace(0, min(group[over].max() for group in arm_runs), 50)
                y = np.mean([np.interp(x, group[over], group.pass_at_1) for group in arm_runs], axis=0)
                axes.plot(x, y, color=f"C{i}", linewidth=2, label=arm.name)
        axes.set_xlabel("seconds of training steps" if over == "seconds" else over)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.grid(axis="y", alpha=0.3)
    figure.axes[0].set_ylabel("held-out pass@1")
    figure.axes[0].legend(frameon=False)
    return figure


def _shown(design: Design, inferred: pd.DataFrame) -> pd.DataFrame:
    """Return the inference as text, in percentage points, or in seconds or rollouts for times until a target."""
    forms = ["{:+,.0f} " + c.over if c.end_point == "reached" else "{:+.1%}" for c in design.comparisons]
    rows = [
        {
            "claim": row.claim,
            "difference": form.format(row.difference),
            "interval": f"{form.format(row.low)} to {form.format(row.high)}",
            "p": f"{row.p:.2g}",
            "p, Holm": f"{row.holm:.2g}",
            "by seed": ", ".join(f"{seed}: {form.format(d)}" for seed, d in row["by seed"].items()),
        }
        for (_, row), form in zip(inferred.iterrows(), forms, strict=True)
    ]
    return pd.DataFrame(rows)


def _markdown(table: pd.DataFrame) -> str:
    cells = [[f"{x:.4g}" if isinstance(x, float) else str(x) for x in row] for row in table.to_numpy().tolist()]
    return "\n".join(f"| {' | '.join(row)} |" for row in [[*table], ["---"] * len(table.columns), *cells])


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def main() -> None:
    """Run the command line. User errors are one line on stderr, with exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("design", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each on its share of the cores")
    parser.add_argument("--plan", action="store_true", help="print the arms and the number of runs, then exit")
    parser.add_argument(
        "--page", action="store_true", help="write page.md and its files from the finished runs, then exit"
    )
    args = parser.parse_args()
    try:
        study = Study(read_design(args.design), args.directory, args.jobs)
        if args.plan:
            print(plan(study))
            return
        study.write_design()
        if not args.page:
            with open(args.directory / ".lock", "w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise UserError(
                        f"{args.directory}: another process runs this study; wait until it has finished"
                    ) from None
                study.execute()
        print(write_page(study))
    except (UserError, OSError) as e:
        print(f"study: {e}", file=sys.stderr)
        sys.exit(2)


def plan(study: Study) -> str:
    """Return the number of runs of each arm and the maximum training time as text."""
    lines = [f"design sha256 {study.sha256}"]
    seconds = 0.0
    for arm in study.design.arms:
        runs = len(study.design.seeds) + len(study._tuning_runs(arm))
        lines.append(f"{arm.name}: {runs} runs, at most {arm.seconds:g} s or {arm.rollouts:,} rollouts (0: no limit)")
        seconds += runs * arm.seconds
    return "\n".join(
        [*lines, f"{seconds / 60:.0f} minutes of training for the arms with a limit in seconds, without evaluations"]
    )


if __name__ == "__main__":
    main()
