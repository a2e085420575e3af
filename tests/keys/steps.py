"""Looks at whole steps: a tiny actor, an engine that draws by keys alone, and what they come to."""

from __future__ import annotations

import hashlib
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import fakes
import pyarrow.parquet as pq
import torch
from dist.steps import make_trainer
from keys.case import Place

from megatron_brorl.config.schema import Config
from megatron_brorl.rollout.engine import Sampling
from megatron_brorl.train.loop import Trainer
from megatron_brorl.train.record import Recorder
from megatron_brorl.train.stall import Stall


class Engine(fakes.Engine):
    """Keeps how it was asked to sample, and takes its time where it is told to."""

    def __init__(self, seconds: float = 0.0, **faults: Any) -> None:
        super().__init__(**faults)
        self.samplings: list[Sampling] = []
        self.seconds = seconds

    def generate(self, requests: Any, sampling: Any, watch: Any = None, supply: Any = None) -> Any:
        self.samplings.append(sampling)
        end = time.monotonic() + self.seconds
        while time.monotonic() < end and not watch.cancelled():
            time.sleep(0.01)
        if watch.cancelled():
            self.stall = {(requests[0].prompt.id, 0)}
        return super().generate(requests, sampling, watch, supply)


def _trainer(config: Config, place: Place, engine: Engine) -> Trainer:
    trainer = make_trainer("model", place.grid, config, engine)
    trainer.state.stall = Stall(config.train.min_delta)
    trainer.refit()
    return trainer


def _weights(trainer: Trainer) -> str:
    digest = hashlib.sha256()
    for _, tensor in trainer.worker.hf_tensors():
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def step(config: Config, place: Place, steps: int = 2, **engine: Any) -> Any:
    """Figures of two steps, names of what is timed, the weights after them, and what the engine was asked."""
    asked = Engine(**engine)
    trainer = _trainer(config, place, asked)
    done = [trainer.train_step() for _ in range(steps)]
    figures = [{k: v for k, v in metrics.items() if "seconds" not in k} for metrics, _ in done]
    return figures, sorted(done[0][1]), _weights(trainer), asked.samplings, len(asked.calls)


def long(config: Config, place: Place) -> Any:
    """The same of four steps."""
    return step(config, place, 4)


def slow(config: Config, place: Place) -> Any:
    """What is lost where the engine takes 0.4 seconds."""
    return step(config, place, 1, seconds=0.4)[0][0]["lost_share"]


def losing(config: Config, place: Place) -> Any:
    """A step that loses one rollout."""
    return step(config, place, 1, lose={("p/0", 0)})


def recorded(config: Config, place: Place) -> Any:
    """Rows of the files that people read."""
    trainer = _trainer(config, place, Engine())
    folder = Path("run/rollouts")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    trainer.recorder = Recorder(folder, config, fakes.Tokenizer().decode, (fakes.STOP,), 0)
    trainer.train_step()
    return [pq.read_metadata(path).num_rows for path in sorted(folder.glob("*.parquet"))]


class Progress:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def update(self, step_done: int, figures: dict[str, str]) -> None:
        pass

    def note(self, text: str) -> None:
        self.notes.append(text)


class Rows:
    """As a MetricsWriter."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def write(self, step: int, metrics: dict[str, float], seconds: dict[str, float]) -> None:
        self.rows.append((step, {k: v for k, v in metrics.items() if "seconds" not in k}, sorted(seconds)))


def run(config: Config, place: Place, **engine: Any) -> Any:
    """A run to its end: steps, figures, what was said, and what lies in run.dir."""
    shutil.rmtree("run", ignore_errors=True)
    trainer, rows, progress = _trainer(config, place, Engine(**engine)), Rows(), Progress()
    trainer.run(rows, progress, lambda: False)  # type: ignore[arg-type]
    files = [str(path) for path in Path("run").rglob("*") if path.suffix == ".json" or path.name.startswith("step_")]
    return trainer.state.step, rows.rows, progress.notes, sorted(files), _weights(trainer)


def broken(config: Config, place: Place) -> Any:
    """A run of an engine whose every row has a log-probability that is not a number."""
    every = {(f"p/{i}", k): float("nan") for i in range(64) for k in range(8)}
    return run(config, place, nonfinite=every)


def written(config: Config, place: Place) -> Any:
    """The threads that write checkpoints of a run."""
    found: list[str] = []
    start = threading.Thread.start

    def told(self: threading.Thread) -> None:
        found.append(self.name)
        start(self)

    place.monkeypatch.setattr(threading.Thread, "start", told)
    run(config, place)
    place.monkeypatch.undo()
    place.monkeypatch.chdir(place.folder)
    return sorted(name for name in found if not name.startswith("ThreadPool"))


def stalls(config: Config, place: Place) -> Any:
    """Evaluations in a row without a gain, where pass@1 goes from 0.1 to 0.2."""
    stall = Stall(config.train.min_delta)
    for score in (0.1, 0.2):
        stall.record(score)
    return stall.count


def evaluation(config: Config, place: Place) -> Any:
    """Of the held-out prompts: figures, and how the engine was asked to sample."""
    engine = Engine()
    trainer = _trainer(config, place, engine)
    return trainer.evaluate(Progress()).as_dict(), engine.samplings  # type: ignore[arg-type]
