"""State of a run apart from weights and optimizers, the checkpoints that store all of it, and the best checkpoint."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_brorl.checkpoints import folders
from megatron_brorl.checkpoints import training as checkpoint
from megatron_brorl.checkpoints.folders import Best
from megatron_brorl.config.schema import Config, CriticConfig, TrainConfig
from megatron_brorl.data.source import PromptSource
from megatron_brorl.errors import UserError
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.train.carried_groups import CarriedGroups, checkpoint_files, read_checkpoint
from megatron_brorl.train.collect import SourcePosition
from megatron_brorl.train.console import passes
from megatron_brorl.train.early_stopping import EarlyStopping
from megatron_brorl.train.models import TrainingModels

# Keys of a checkpoint's run.json and the types of their values, apart from those that checkpoints.training adds.
_SAVED = {
    "updates": (int,),
    "critic_updates": (int,),
    "critic_steps": (int,),
    "taken": (int,),
    "prompts_taken": (int,),
    "recently": (list,),
    "trained_s": (int, float),
    "spent": (int, float),
    "stalls": (list,),
    "before": (dict, type(None)),
    "fingerprint": (dict,),
    "began": (int, float),
}
_BEST = (int, str, float)  # types in its list
_PLAIN = ("updates", "critic_updates", "critic_steps", "trained_s", "began")  # saved without conversion


@dataclass
class RunState:
    """Progress of a run. Every step updates it, and every checkpoint stores it."""

    early_stopping: EarlyStopping = field(default_factory=EarlyStopping)  # by held-out pass@1
    step: int = 0  # steps done
    source_position: SourcePosition = field(default_factory=SourcePosition)
    updates: int = 0  # optimizer steps taken; the version of the actor's weights
    critic_updates: int = 0  # optimizer steps taken of the critic
    critic_steps: int = 0  # training steps in which the critic was updated
    carried: CarriedGroups = field(default_factory=CarriedGroups)  # groups that the next step continues or trains on
    initial_evaluation: dict[str, Any] | None = None  # before the first step
    trained_s: float = 0.0  # seconds of the steps done, each of the slowest rank
    spent: float = 0.0  # wall-clock seconds of the processes before this one
    best: Best | None = None  # the best checkpoint on the disk (train.keep_best)
    began: float = 0.0  # Unix time at which the first process of the job began; 0 if unknown

    def in_critic_warmup(self, critic: CriticConfig) -> bool:
        """Return whether the critic has been updated, but not yet the actor (critic.warmup_steps)."""
        return 0 < self.critic_steps <= critic.warmup_steps

    def is_complete(self, config: TrainConfig) -> bool:
        """Return whether train.steps, train.max_seconds or train.patience is reached. The same on all ranks."""
        return (
            self.step >= config.steps
            or bool(config.max_seconds and self.trained_s >= config.max_seconds)
            or bool(config.patience and self.early_stopping.count >= config.patience)
        )


def begin_save(
    state: RunState,
    models: TrainingModels,
    config: Config,
    grid: Grid,
    fingerprint: dict[str, Any],
    seconds: float,
    copy: bool = False,
    new_best: Best | None = None,
) -> checkpoint.Save:
    """Capture the state of the run for a checkpoint; Save.write writes it. Collective.

    fingerprint: see cli.run_folder. seconds: those of the job so far. copy: copy the state, because the run continues
    before it is written. new_best: set if this is the best checkpoint so far.
    """
    best = new_best or state.best
    run = {
        **{name: getattr(state, name) for name in _PLAIN},
        "before": state.initial_evaluation,
        "taken": state.source_position.rounds,
        "prompts_taken": state.source_position.prompts,
        "recently": [state.source_position.recent_prompts, state.source_position.recent_kept],
        "stalls": [[counter.best, counter.count] for counter in _counters(state, models)],
        "fingerprint": fingerprint,
        "spent": seconds,
        folders.BEST: [best.step, best.metric, best.value] if best else None,
    }
    save = checkpoint.begin(
        root=Path(config.run.dir) / "checkpoints",
        step=state.step,
        models=models.checkpoint_parts(),
        run=run,
        keep=config.train.keep_checkpoints,
        files=checkpoint_files(state.carried, grid),
        copy=copy,
    )
    save.best = new_best
    return save


def read_run_json(directory: Path) -> dict[str, Any]:
    """Return a checkpoint's run.json. Raises UserError if another version wrote it."""
    run = checkpoint.read_run(directory)
    found = run.get(folders.BEST)
    strange = [key for key, kinds in _SAVED.items() if key not in run or type(run[key]) not in kinds]
    if found is not None and not (isinstance(found, list) and tuple(map(type, found)) == _BEST):
        strange.append(folders.BEST)
    if strange:
        raise UserError(
            f"{directory / checkpoint.RUN}: {strange[0]} is missing or of another type: another version wrote it; "
            "continue with that version, or start a new run with another run.dir"
        )
    return run


def restore(
    directory: Path, state: RunState, models: TrainingModels, source: PromptSource, config: Config, grid: Grid
) -> RunState:
    """Return the state that a checkpoint holds, and load weights and optimizers into `models`. Collective.

    The caller has checked the fingerprint. state: that of a run before its first step.
    """
    # Read and check run.json before any weight changes.
    run = read_run_json(directory)
    checkpoint.load(directory, models.checkpoint_parts())
    restored = RunState(
        **{name: run[name] for name in _PLAIN},
        early_stopping=replace(state.early_stopping),
        step=run[checkpoint.STEP],
        source_position=SourcePosition(run["taken"], run["prompts_taken"], *run["recently"]),
        carried=read_checkpoint(directory, source, grid),
        initial_evaluation=run["before"],
        spent=run["spent"],
        best=folders.best_so_far(directory.parent, run, run[checkpoint.STEP], config.train.keep_best),
    )
    for counter, (score, count) in zip(_counters(restored, models), run["stalls"], strict=True):
        counter.best = score
        counter.count = count
    return restored


def record_evaluation(state: RunState, models: TrainingModels, pass_at_1: float) -> None:
    """Count an evaluation for train.patience and for resetting the reference policy."""
    for counter in _counters(state, models):
        counter.record(pass_at_1)


def _counters(state: RunState, models: TrainingModels) -> list[EarlyStopping]:
    """Return the counters of evaluations without a new best, in the order of a checkpoint."""
    return [state.early_stopping, *([models.reference.early_stopping] if models.reference else [])]


def new_best(config: Config, state: RunState, metrics: Mapping[str, float]) -> Best | None:
    """Return the score of the current weights if they are the best so far (train.keep_best), else None.

    metrics: of the step, with those of its evaluation if there was one.
    """
    found = passes(metrics)
    metric = config.train.keep_best
    if not (found and metric):
        return None
    k = max(map(int, found)) if metric == "pass_at_k" else 1
    value = found[str(k)]  # The earlier one wins a tie.
    is_best = not math.isnan(value) and (state.best is None or value > state.best.value)
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
        print(f"warning: {root / folders.BEST}: cannot be written: {e.strerror}", file=sys.stderr, flush=True)
