"""One training run to its budget, with evaluations on the way that its clock does not count."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy
import torch

from megatron_brorl import __version__
from megatron_brorl.checkpoints.training import find
from megatron_brorl.cli.build import Session
from megatron_brorl.cli.train import build_trainer
from megatron_brorl.config.schema import Config
from megatron_brorl.errors import UserError
from megatron_brorl.parallel import collectives
from megatron_brorl.train.loop import Trainer
from study import results
from study.answers import ask
from study.design import Design, sha256
from study.order import Run
from study.places import UNSEEN, Place, place_of, work
from study.warm_start import SUPPORT, TRAINED, UNTRAINED


def make(design: Design, directory: Path, run: Run, commit: str) -> None:
    """Train, and write the run's rows. Where the training fails the rows say how, up to there."""
    place, begun, load = place_of(directory, run.warm_start), time.time(), os.getloadavg()[0]
    config = design.run_config(overrides(design, run, place, directory))
    with Session(config) as session:
        trainer = build_trainer(session, begun)
        if run.after:
            trainer.restore(_checkpoint(directory, run.after))
        trainer.refit()
        # Verifiers and engine are started by what asks them first, which no arm's clock shall pay for.
        ask(session, trainer.rollouts, session.sources.rows, 1, 1, "study first")
        clock = _Clock(trainer)
        points, error = _train(design, run, session, trainer, clock, place)
        if run.part and not error:
            trainer.save()

        # What every row repeats.
        if session.is_main_rank:
            repeated = common(design, run, config, commit) | {"error": error, "load_average": load, "began": begun}
            results.write_run(directory, run.name, [repeated | point for point in points])


def _train(
    design: Design, run: Run, session: Session, trainer: Trainer, clock: _Clock, place: Place
) -> tuple[list[dict[str, Any]], str]:
    """The points of the curve, a row per prompt set, and what ended the run early."""
    rows = _start(design, run, session, trainer, clock, place)
    number, points = 0, design.evaluation.points
    while number < points:
        try:
            clock.step()
        except UserError as e:  # a rate that is too high leaves weights that are not finite: that is a result
            return rows, str(e)

        # The clock stands still from here on.
        number_now = min(int(points * design.budget.used(clock.spent)), points)
        if number_now > number:
            number, kept = number_now, clock.kept_share()
            found = _ask(design, session, trainer, last=number == points)
            rows += [clock.row() | {"point": number, "kept_share": kept, **columns} for columns in found]
    return rows, ""


def _start(
    design: Design, run: Run, session: Session, trainer: Trainer, clock: _Clock, place: Place
) -> list[dict[str, Any]]:
    """The first point: of the warm start it is known already."""
    if run.after:
        found = _ask(design, session, trainer, last=True)
    else:
        known = json.loads(place.start.read_text(encoding="utf-8"))
        names = {"trained": run.bin, "unseen": UNSEEN, "support": f"{run.bin} support"}
        found = [{"prompt_set": name, **known[key]} for name, key in names.items() if key in known]
    return [clock.row() | {"point": 0, "kept_share": None, **columns} for columns in found]


def _ask(design: Design, session: Session, trainer: Trainer, last: bool) -> list[dict[str, Any]]:
    """Evaluate every prompt set; last: the end of a run, or its start."""
    e, trained, unseen = design.evaluation, session.sources.rows, session.sources.held_out
    sets = [
        ("trained", trained, e.trained, TRAINED),
        ("unseen", unseen, e.final_unseen if last else e.unseen, UNTRAINED),
        *([("support", trained, e.support, SUPPORT)] if e.support and last else []),
    ]
    return [
        {"prompt_set": name, **ask(session, trainer.rollouts, prompts, samples, e.k, stream)}
        for name, prompts, samples, stream in sets
    ]


class _Clock:
    """What a run has spent: seconds of its steps alone, on the slowest rank; the same on every rank."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.spent = {"seconds": 0.0, "rollouts": 0.0, "tokens": 0.0}
        self._cpu = self._kept = self._groups = 0.0
        self._began = trainer.state.step, trainer.state.updates

    def step(self) -> None:
        """One step of the run, timed from its first prompt to the new weights in the engine. A collective."""
        trainer, before, cpu = self._trainer, self._trainer.state.taken.prompts, time.process_time()
        metrics, seconds = trainer.train_step()
        cpu = time.process_time() - cpu
        self._cpu += collectives.all_reduce_sum({"cpu": cpu})["cpu"]

        # Prompts of all rounds, those of groups that were dropped among them.
        prompts = trainer.train_source.take(before, trainer.state.taken.prompts - before)
        self.spent["seconds"] += collectives.all_reduce_max({"step": seconds["step"]})["step"]
        self.spent["rollouts"] += len(prompts) * trainer.config.rollout.n
        self.spent["tokens"] += metrics["rollouts"] * metrics["response_tokens"]
        self.spent["tokens"] += sum(len(prompt.token_ids) for prompt in prompts)
        self._kept += metrics["kept_share"] * len(prompts)
        self._groups += len(prompts)
        if trainer.grid.rank == 0:
            phases = ", ".join(f"{name} {seconds[name]:.2f}" for name in ("generate", "score", "train", "refit"))
            print(f"step {trainer.state.step}: {seconds['step']:.2f} s ({phases})", flush=True)

    def kept_share(self) -> float:
        """Of groups since this was last asked."""
        share = self._kept / self._groups
        self._kept = self._groups = 0.0
        return share

    def row(self) -> dict[str, Any]:
        """The columns of a point."""
        s, (step, updates) = self._trainer.state, self._began
        return {**self.spent, "cpu_seconds": self._cpu, "steps": s.step - step, "updates": s.updates - updates}


def overrides(design: Design, run: Run, place: Place, directory: Path) -> list[str]:
    """Of the configuration that all runs share: what makes it this run's."""
    arm = design.arm(run.arm)
    own = {
        "model.path": place.model,
        "run.dir": work(directory, run.name),
        "run.seed": run.warm_start,  # the same for all arms: they are paired
        "run.record_groups": 0,
        "rollout.n": arm.n,
        "rollout.prompts": arm.prompts,
        "optim.lr": run.lr,
        "data.train": json.dumps([str(place.prompts(run.bin))]),
        "data.held_out": json.dumps([str(place.prompts(UNSEEN))]),
        "data.tasks": "[]",
        "data.template": "{prompt}",  # prompts are written with it
        "theory.every": 0,
    }
    return [*(f"{key}={value}" for key, value in own.items()), *arm.overrides]


def _checkpoint(directory: Path, run: str) -> Path:
    found = find(work(directory, run) / "checkpoints")
    if found is None:
        raise UserError(f"{work(directory, run)}: has no checkpoint to go on from; delete {run}.parquet to repeat it")
    return found


def common(design: Design, run: Run, config: Config, commit: str) -> dict[str, Any]:
    """Which run it is, of what, with what, on what machine."""
    whole = json.dumps(dataclasses.asdict(config), sort_keys=True, default=str)
    versions = {
        "megatron_brorl": __version__,
        "commit": commit,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }
    arm = design.arm(run.arm)
    return {
        "design_sha256": sha256(design),
        "config_sha256": hashlib.sha256(whole.encode()).hexdigest(),
        "run": run.name,
        **{key: getattr(run, key) for key in ("phase", "arm", "bin", "warm_start", "part", "lr")},
        "n": arm.n,
        "prompts_per_step": arm.prompts,
        "machine": f"{_processor()}, {os.cpu_count()} cores, {design.processes} processes",
        "versions": json.dumps(versions, sort_keys=True),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
