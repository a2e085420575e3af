"""The newest and the best checkpoint stay. Evaluations are replaced by given scores."""

from __future__ import annotations

import fakes
import pytest
from conversions import refuse_checkpoint
from dist.steps import configured, make_trainer

from megatron_brorl.algo.statistics import Interval
from megatron_brorl.checkpoints import folders
from megatron_brorl.checkpoints import training as checkpoint
from megatron_brorl.checkpoints.folders import Best
from megatron_brorl.train.console import evaluation_metrics
from megatron_brorl.train.evaluate import Evaluation
from megatron_brorl.train.state import mark_last_as_best

ROWS = {"rollout": {"n": 4, "prompts": 2}, "theory": {"every": 0}}


def evaluation(pass_at_1: float, **pass_at_k: float) -> Evaluation:
    """Return an evaluation with these pass rates, such as k4=0.5 for pass@4, and arbitrary other values."""
    interval = Interval(pass_at_1, pass_at_1, pass_at_1)
    pass_rates = {1: pass_at_1, **{int(k[1:]): value for k, value in pass_at_k.items()}}
    return Evaluation(interval, pass_rates, {}, ["exact"], interval, response_tokens=3.0, prompts=5, samples=4, lost=0)


def trainer_of(model, processes, tmp_path, planted, **train):
    """Return a run that evaluates after every step except the last; planted: the evaluations by step."""
    settings = {"steps": 9, "keep_best": "pass_at_1", "keep_checkpoints": 1, "checkpoint_every": 0, **train}
    changes = {**ROWS, "run": {"seed": 3, "dir": str(tmp_path)}, "train": settings, "evaluate": {"every": 1}}
    trainer = make_trainer(model[0], processes, configured(changes), fakes.Engine())
    trainer.held_out = [None]  # not empty, so that the run evaluates
    trainer.state.initial_evaluation = {}
    trainer.evaluate = lambda _: planted[trainer.state.step]
    return trainer


def saved(tmp_path):
    """Return the checkpoints, the newest step and the best checkpoint."""
    root = tmp_path / "checkpoints"
    names = {p.name for p in root.iterdir() if p.is_dir()}
    return names, folders.read_pointer(root / "latest"), folders.read_best(root)


def run_to(trainer, step):
    """Run until a step is done, and return whether the run is complete."""
    return trainer.run(None, fakes.Notes(), lambda: trainer.state.step == step)


def scored(*scores):
    return {step: evaluation(score) for step, score in enumerate(scores, 1)}


def test_best_and_newest_checkpoints_stay(processes, model, tmp_path):
    """Steps 1 and 3 have a new best score; steps 2, 4 and 5 have none, and are saved only if the run stops there."""
    planted = scored(0.25, 0.125, 0.5, 0.5, 0.375)
    trainer = trainer_of(model, processes, tmp_path, planted)
    assert not run_to(trainer, 2)
    assert saved(tmp_path) == ({"step_00000001", "step_00000002"}, 2, Best(1, "pass_at_1", 0.25))
    assert not run_to(trainer, 5)
    assert saved(tmp_path) == ({"step_00000003", "step_00000005"}, 5, Best(3, "pass_at_1", 0.5))
    assert trainer.state.best == Best(3, "pass_at_1", 0.5)
    # An evaluation belongs to the weights that it evaluated.
    assert checkpoint.read_run(tmp_path / "checkpoints" / "step_00000003")["step"] == 3
    assert (tmp_path / "checkpoints" / "best").read_text() == "step_00000003\npass_at_1 0.5\n"


@pytest.mark.parametrize(("metric", "best_step"), [("pass_at_1", 2), ("pass_at_k", 1)])
def test_keep_best_uses_the_chosen_metric(processes, model, tmp_path, metric, best_step):
    """pass_at_k means the largest k."""
    planted = {1: evaluation(0.1, k2=0.3, k16=0.9), 2: evaluation(0.2, k2=0.8, k16=0.7), 3: evaluation(0.1)}
    trainer = trainer_of(model, processes, tmp_path, planted, keep_best=metric)
    assert not run_to(trainer, 2)
    assert saved(tmp_path)[2] == Best(best_step, metric, {"pass_at_1": 0.2, "pass_at_k": 0.9}[metric])


def test_resumed_run_knows_the_best_score(processes, model, tmp_path):
    first = trainer_of(model, processes, tmp_path, scored(0.5, 0.25))
    assert not run_to(first, 2)
    second = trainer_of(model, processes, tmp_path, scored(0, 0, 0.375, 0.5, 0.625))
    second.restore(checkpoint.find(tmp_path / "checkpoints"))
    assert second.state.best == Best(1, "pass_at_1", 0.5)
    assert not run_to(second, 4)
    assert saved(tmp_path) == ({"step_00000001", "step_00000004"}, 4, Best(1, "pass_at_1", 0.5))
    third = trainer_of(model, processes, tmp_path, scored(0, 0, 0, 0, 0.625))
    third.restore(checkpoint.find(tmp_path / "checkpoints"))
    assert not run_to(third, 5)
    assert saved(tmp_path) == ({"step_00000005"}, 5, Best(5, "pass_at_1", 0.625))


@pytest.mark.parametrize("died", ["before latest", "before best", "before rotation"])
def test_kill_between_checkpoint_and_pointer_is_repaired(processes, model, tmp_path, monkeypatch, died):
    """The folder of step 3 exists, but a pointer file is missing. The next process writes it."""
    trainer = trainer_of(model, processes, tmp_path, scored(0.25, 0.125, 0.5, 0.375), checkpoint_every=1)
    assert not run_to(trainer, 2)

    class Killed(BaseException):
        """An exception that the run does not catch."""

    def die(*_):
        raise Killed

    write_pointer = folders.write_pointer
    with monkeypatch.context() as patch:
        if died == "before rotation":
            patch.setattr(folders, "rotate", die)
        else:
            name = died.removeprefix("before ")
            patch.setattr(folders, "write_pointer", lambda p, text: die() if p.name == name else write_pointer(p, text))
        with pytest.raises(Killed):
            run_to(trainer, 3)
    assert {"step_00000001", "step_00000002", "step_00000003"} == saved(tmp_path)[0]

    resumed = trainer_of(model, processes, tmp_path, scored(0, 0, 0, 0.375), checkpoint_every=1)
    resumed.restore(checkpoint.find(tmp_path / "checkpoints"))
    assert resumed.state.step == 3
    assert resumed.state.best == Best(3, "pass_at_1", 0.5)
    assert saved(tmp_path) == ({"step_00000003"}, 3, Best(3, "pass_at_1", 0.5))
    assert not run_to(resumed, 4)
    assert saved(tmp_path) == ({"step_00000003", "step_00000004"}, 4, Best(3, "pass_at_1", 0.5))


def test_refused_checkpoint_is_not_the_best(processes, model, tmp_path, monkeypatch):
    """The disk refuses the checkpoint of step 2, so step 3 becomes the best one."""
    trainer = trainer_of(model, processes, tmp_path, scored(0.25, 0.75, 0.5))
    refuse_checkpoint(monkeypatch, trainer, step=2)
    assert not run_to(trainer, 3)
    assert saved(tmp_path) == ({"step_00000003"}, 3, Best(3, "pass_at_1", 0.5))


def test_final_evaluation_can_be_the_best(processes, model, tmp_path):
    trainer = trainer_of(model, processes, tmp_path, scored(0.5, 0.25), steps=3)
    assert trainer.run(None, fakes.Notes(), lambda: False)
    assert saved(tmp_path) == ({"step_00000001", "step_00000003"}, 3, Best(1, "pass_at_1", 0.5))
    mark_last_as_best(trainer.config, trainer.state, evaluation_metrics(evaluation(0.5)))  # a tie
    assert saved(tmp_path) == ({"step_00000001", "step_00000003"}, 3, Best(1, "pass_at_1", 0.5))
    mark_last_as_best(trainer.config, trainer.state, evaluation_metrics(evaluation(0.75)))
    assert saved(tmp_path) == ({"step_00000003"}, 3, Best(3, "pass_at_1", 0.75))
    # With more steps, the resumed run takes the best score from the pointer file, because run.json was written before.
    resumed = trainer_of(model, processes, tmp_path, scored(0, 0, 0, 0.625), steps=9)
    resumed.restore(checkpoint.find(tmp_path / "checkpoints"))
    assert not run_to(resumed, 4)
    assert saved(tmp_path) == ({"step_00000003", "step_00000004"}, 4, Best(3, "pass_at_1", 0.75))
