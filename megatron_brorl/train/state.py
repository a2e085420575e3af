"""The state of a run beside weights and optimizers, and the checkpoints that hold all of it."""

from __future__ import annotations

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
from megatron_brorl.train.early_stopping import Stall
from megatron_brorl.train.models import TrainingModels
from megatron_brorl.train.partial_rollouts import Carried, files, read
from megatron_brorl.train.rounds import Taken

# What a checkpoint's run.json says of a run, beside what checkpoints.training puts there.
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
_PLAIN = ("updates", "critic_updates", "critic_steps", "before", "trained_s", "began")  # saved without conversion


@dataclass
class RunState:
    """Progress of a run. Every step updates it, and every checkpoint stores it."""

    stall: Stall = field(default_factory=Stall)  # of held-out pass@1
    step: int = 0  # steps done
    taken: Taken = field(default_factory=Taken)  # from the source
    updates: int = 0  # optimizer steps taken; the version of the actor's weights
    critic_updates: int = 0  # optimizer steps taken of the critic
    critic_steps: int = 0  # training steps in which the critic was updated
    carried: Carried = field(default_factory=Carried)  # rollouts that continue in the next step
    before: dict[str, Any] | None = None  # the evaluation before step 0
    trained_s: float = 0.0  # seconds of the steps done, of the slowest rank each
    spent: float = 0.0  # seconds of the processes that this one goes on from
    best: Best | None = None  # of train.keep_best, on the disk
    began: float = 0.0  # Unix time at which the job began, whatever process goes on with it; 0 = not known

    def critic_warms_up(self, critic: CriticConfig) -> bool:
        """Whether the critic has been updated and the actor still waits for it (critic.warmup_steps)."""
        return 0 < self.critic_steps <= critic.warmup_steps

    def over(self, config: TrainConfig) -> bool:
        """Whether train.max_seconds or train.patience ends the run; all ranks get the same answer."""
        out_of_time = bool(config.max_seconds) and self.trained_s >= config.max_seconds
        return out_of_time or (bool(config.patience) and self.stall.count >= config.patience)


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
    """Take a checkpoint of the run, to be written; a collective.

    fingerprint: see cli.run_folder. seconds: of the job so far. copy: whether the run continues before it is written.
    new_best: what this checkpoint is the best in, so far.
    """
    known = new_best or state.best
    run = {
        **{name: getattr(state, name) for name in _PLAIN},
        "taken": state.taken.rounds,
        "prompts_taken": state.taken.prompts,
        "recently": [state.taken.asked, state.taken.kept],  # the share of groups kept, which sizes the next round
        "stalls": [[stall.best, stall.count] for stall in stalls(state, models)],
        "fingerprint": fingerprint,
        "spent": seconds,
        folders.BEST: known.as_json() if known else None,
    }

    root, keep = Path(config.run.dir) / "checkpoints", config.train.keep_checkpoints
    own = files(state.carried, grid)
    save = checkpoint.begin(root, state.step, models.checkpoint_parts(), run, keep, own, copy)
    save.best = new_best
    return save


def saved(directory: Path) -> dict[str, Any]:
    """What a checkpoint says of its run. Raises UserError where it is not what this version writes."""
    run = checkpoint.read_run(directory)
    found = run.get(folders.BEST)
    strange = [key for key, kinds in _SAVED.items() if type(run.get(key, key)) not in kinds]
    if found is not None and not (isinstance(found, list) and tuple(map(type, found)) == _BEST):
        strange.append(folders.BEST)
    if strange:
        raise UserError(
            f"{directory / checkpoint.RUN}: {strange[0]} is missing or of another type: another version wrote it; go "
            "on with that version, or start anew with another run.dir or train.resume=never"
        )
    return run


def restore(
    directory: Path, state: RunState, models: TrainingModels, source: PromptSource, config: Config, grid: Grid
) -> RunState:
    """The state that a checkpoint holds; models get its weights and optimizers. A collective.

    The caller has checked the fingerprint. state: of a run that has not begun, for the settings of its stall.
    """
    # Read and checked before any weight is touched.
    run = saved(directory)
    checkpoint.load(directory, models.checkpoint_parts())
    restored = RunState(
        **{name: run[name] for name in _PLAIN},
        stall=replace(state.stall),
        step=run[checkpoint.STEP],
        taken=Taken(run["taken"], run["prompts_taken"], *run["recently"]),
        carried=read(directory, source, grid),
        spent=run["spent"],
        best=folders.best_so_far(directory.parent, run, run[checkpoint.STEP], config.train.keep_best),
    )
    # The margin of a stall is the configuration's, its count the checkpoint's.
    for stall, (score, count) in zip(stalls(restored, models), run["stalls"], strict=True):
        stall.best, stall.count = score, count
    return restored


def stalls(state: RunState, models: TrainingModels) -> list[Stall]:
    """The counters of evaluations without a new best, in the order of a checkpoint."""
    return [state.stall, *([models.reference.stall] if models.reference else [])]
