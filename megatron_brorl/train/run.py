"""Everything a run consists of: its objects, its state, and what is done with all of them at once."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_brorl import rollout_log
from megatron_brorl.checkpoints import folders
from megatron_brorl.checkpoints.folders import Best
from megatron_brorl.checkpoints.training import BackgroundSaver, NotWritten
from megatron_brorl.config.schema import Config
from megatron_brorl.data.source import PromptSource
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.tracking.progress import Progress
from megatron_brorl.tracking.timeline import span
from megatron_brorl.train import keep_best, state
from megatron_brorl.train.callbacks import Callbacks
from megatron_brorl.train.evaluate import Evaluation, evaluate
from megatron_brorl.train.models import CriticWorker, TrainingModels
from megatron_brorl.train.recorder import Recorder
from megatron_brorl.train.reference import ReferencePolicy
from megatron_brorl.train.sample_and_score import Rollouts
from megatron_brorl.train.samples import look_at
from megatron_brorl.train.sampling_params import evaluation_sampling
from megatron_brorl.train.state import RunState
from megatron_brorl.train.weight_sync import sync_engines
from megatron_brorl.train.worker import Worker
from megatron_brorl.types import Prompt


@dataclass
class Run:
    """What a step changes is `state`, weights and optimizers."""

    config: Config
    grid: Grid
    worker: Worker
    rollouts: Rollouts
    train_source: PromptSource
    held_out: list[Prompt]
    stop_ids: tuple[int, ...]
    fingerprint: dict[str, Any]  # see cli.run_folder, for checkpoints
    started: float  # Unix time at which this process's part of the job began
    state: RunState = field(default_factory=RunState)
    critic: CriticWorker | None = None  # of algo.advantage = "gae"
    reference: ReferencePolicy | None = None  # of algo.kl_coef
    recorder: Recorder | None = None  # of what people can read of the rollouts
    callbacks: Callbacks = field(default_factory=Callbacks)  # of a program of the user's; none on other ranks
    saving: BackgroundSaver = field(default_factory=BackgroundSaver)  # the checkpoint that is on its way
    nonfinite_steps: int = 0  # steps in a row, see train.nonfinite; each process counts from 0

    def __post_init__(self) -> None:
        # From here on a clock that nobody sets.
        self._before, self._begun = max(0.0, time.time() - self.started), time.monotonic()
        self._held_up = {"checkpoint": 0.0, "checkpoint_wait": 0.0}

    def refit(self) -> dict[str, float]:
        """Hand the actor's weights to the engines; see weight_sync.sync_engines."""
        # An engine that is a process may be started again.
        c = self.config
        with span("refit", 0.0 if c.rollout.engine == "torch" else c.engine.start_timeout_s):
            return sync_engines(self.models(), self.rollouts, self.state.updates, c)

    def evaluate(self, progress: Progress) -> Evaluation:
        """Of the held-out prompts with the weights that the engines have; a collective."""
        sampling = evaluation_sampling(self.config, self.stop_ids)
        look = look_at(self.recorder, self.state.step, self.rollouts.tokenizer.decode, self.stop_ids, progress.note)
        evaluation = evaluate(self.rollouts, self.held_out, self.config.evaluate, sampling, look)
        if evaluation.lost:
            progress.note(evaluation.remark())
        if self.recorder:
            self.grid.barrier()  # every rank has written what it sampled
        with span("callbacks"):
            if self.callbacks:
                moment = rollout_log.Moment("evaluation", self.state.step)
                samples = rollout_log.read_rollouts(Path(self.config.run.dir) / rollout_log.FOLDER, moment)
                self.callbacks.tell("on_evaluation", self.state.step, evaluation.as_dict(), samples)
        return evaluation

    def models(self) -> TrainingModels:
        """What a step trains and asks about its tokens."""
        return TrainingModels(self.worker, self.critic, self.reference)

    def save(self, wait: bool = True, new_best: Best | None = None) -> None:
        """Write a checkpoint; a collective. Raises NotWritten, on all ranks, where the disk does not take it.

        new_best: what it is the best in, as keep_best.new_best says.
        wait: until it is there; else it is written while the run goes on, where train.checkpoint_async says so, and
        `written` tells what became of it.
        """
        begun, later = time.monotonic(), self.config.train.checkpoint_async and not wait
        with span("checkpoint"):
            self._settle()  # one at a time
            save = state.begin_save(
                self.state, self.models(), self.config, self.grid, self.fingerprint, self.seconds(), later, new_best
            )
            if later:
                self.saving.start(save, timedelta(seconds=self.config.parallel.timeout_s))
            else:
                save.write()
                save.agree()
                self.state.best = new_best or self.state.best
        self._held_up["checkpoint"] += time.monotonic() - begun

    def try_save(self, progress: Progress, wait: bool = True, new_best: Best | None = None) -> bool:
        """The same for runs that go on all the same; False where it is not written, which is told."""
        try:
            self.save(wait, new_best)
        except NotWritten as e:
            progress.note(f"warning: {e}; the run goes on and tries again after its next step")
            return False
        return True

    def written(self, progress: Progress, wait: bool) -> bool:
        """False where a checkpoint that was written meanwhile has failed, which is told; a collective.

        wait: until what is under way has ended.
        """
        begun = time.monotonic()
        try:
            if wait or not self.saving.busy():
                self._settle()
        except NotWritten as e:
            progress.note(f"warning: {e}; the run goes on and saves its present state")
            return False
        finally:
            self._held_up["checkpoint_wait"] += time.monotonic() - begun
        return True

    def _settle(self) -> None:
        done = self.saving.settle()
        if done and done.best:
            self.state.best = done.best

    def held_up(self) -> dict[str, float]:
        """Seconds that checkpoints have held up the run since this was last asked."""
        found, self._held_up = self._held_up, dict.fromkeys(self._held_up, 0.0)
        return found

    def restore(self, directory: Path) -> None:
        """Go on from a checkpoint whose fingerprint the caller has checked; a collective."""
        self.state = state.restore(directory, self.state, self.models(), self.train_source, self.config, self.grid)
        if self.grid.rank == 0:
            keep_best.repair(directory.parent, self.state.best)  # before older ones go, of which it may be one
            folders.repair(directory.parent, self.state.step, self.config.train.keep_checkpoints)

    def seconds(self) -> float:
        """Wall-clock seconds of the job so far, up to the checkpoint for processes that were killed."""
        return self.state.spent + self._before + time.monotonic() - self._begun
