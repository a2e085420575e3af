"""State of a run apart from weights and optimizers, the checkpoints that store all of it, and the best checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, InstanceOf, ValidationError

from megatron_brorl.checkpoints import folders
from megatron_brorl.checkpoints import training as checkpoint
from megatron_brorl.checkpoints.folders import Best
from megatron_brorl.config.schema import Config, TrainConfig
from megatron_brorl.errors import UserError, warn
from megatron_brorl.train.carried_groups import CarriedGroups
from megatron_brorl.train.collect import SourcePosition
from megatron_brorl.train.console import pass_at_k


class EarlyStopping(BaseModel):
    """The best score, and the number of evaluations in a row that did not exceed it."""

    best: float | None = None
    count: int = 0

    def record(self, score: float) -> None:
        """Count an evaluation with this score."""
        if self.best is None or score > self.best:
            self.best = score
            self.count = 0
        else:
            self.count += 1


class RunState(BaseModel):
    """Progress of a run. Every step updates it, and run.json of every checkpoint stores it."""

    step: int = 0  # steps done
    source_position: SourcePosition = SourcePosition()
    updates: int = 0  # optimizer steps taken; the version of the actor's weights
    critic_updates: int = 0  # optimizer steps taken of the critic
    critic_steps: int = 0  # training steps in which the critic was updated
    early_stopping: EarlyStopping = Field(default_factory=EarlyStopping)  # by held-out pass@1, for train.patience
    reference_stopping: EarlyStopping = Field(default_factory=EarlyStopping)  # for reference.reset_patience
    initial_evaluation: dict[str, Any] | None = None  # before the first step
    trained_s: float = 0.0  # seconds of the steps done, each of the slowest rank
    elapsed_s: float = 0.0  # wall-clock seconds of the processes before this one
    started_at: float = 0.0  # Unix time at which the first process of the job started; 0 if unknown
    best: Best | None = None  # the best checkpoint on the disk (train.keep_best)
    fingerprint: dict[str, dict[str, Any]] = {}  # settings that a resumed run must share, see cli.run_folder
    # Groups that the next step continues or trains on. They have files of their own.
    carried: InstanceOf[CarriedGroups] = Field(default_factory=CarriedGroups, exclude=True)

    def is_complete(self, config: TrainConfig) -> bool:
        """Return whether train.steps, train.max_seconds or train.patience is reached. The same on all ranks."""
        return (
            self.step >= config.steps
            or self.seconds_left(config) <= 0
            or bool(config.patience and self.early_stopping.count >= config.patience)
        )

    def seconds_left(self, config: TrainConfig) -> float:
        """Return the seconds of training steps until train.max_seconds; infinite without that limit."""
        return config.max_seconds - self.trained_s if config.max_seconds else math.inf

    def steps_left(self, config: TrainConfig) -> float:
        """Return the number of steps until train.max_seconds at the mean speed so far; infinite without that limit."""
        return max(0.0, self.seconds_left(config)) * self.step / self.trained_s if self.trained_s else math.inf


def read_state(directory: Path) -> RunState:
    """Return the state in a checkpoint's run.json, without its groups. Raises UserError if another version wrote it."""
    run = checkpoint.read_run(directory)
    try:
        state = RunState.model_validate_json(json.dumps(run), strict=True)
        # pydantic would take the defaults for missing keys.
        saved = state.model_dump().items()
        wrong_keys = [name for name, value in saved if name not in run or _keys(run[name]) != _keys(value)]
    except ValidationError as e:
        wrong_keys = [".".join(map(str, e.errors()[0]["loc"]))]
    if wrong_keys:
        raise UserError(
            f"{directory / checkpoint.RUN}: {wrong_keys[0]} is missing or of another type: another version wrote it; "
            "continue with that version, or start a new run with another run.dir"
        )
    return state


def _keys(value: Any) -> Any:
    """Return the keys of nested dicts, with None in place of other values."""
    return {key: _keys(inner) for key, inner in value.items()} if isinstance(value, dict) else None


def new_best(config: Config, state: RunState, metrics: Mapping[str, float]) -> Best | None:
    """Return the score of the current weights if they are the best so far (train.keep_best), else None.

    metrics: of the step, with those of its evaluation if there was one.
    """
    scores = pass_at_k(metrics)
    metric = config.train.keep_best
    if not (scores and metric):
        return None
    k = max(map(int, scores)) if metric == "pass_at_k" else 1
    value = scores[str(k)]
    is_best = not math.isnan(value) and (state.best is None or value > state.best.value)  # An earlier one wins a tie.
    return Best(state.step, metric, value) if is_best else None


def mark_last_as_best(config: Config, state: RunState, metrics: Mapping[str, float]) -> None:
    """Mark the last checkpoint as the best one if the evaluation at the end says so. Main rank.

    Logs a warning if the disk refuses it; the earlier best checkpoint then stays.
    """
    root = Path(config.run.dir) / "checkpoints"
    best = new_best(config, state, metrics)
    if not (best and best.step in folders.by_step(root)):
        return
    try:
        folders.write_best(root, best)
        state.best = best
        folders.rotate(root, best.step, config.train.keep_checkpoints)
    except OSError as e:
        warn(f"{root / folders.BEST}: cannot be written: {e.strerror}")
