"""When a run saves, waits for a background save, and saves again after the disk refused a checkpoint."""

from __future__ import annotations

import errno
import json
import os
import threading

import fakes
import pytest
from conversions import refuse_checkpoint
from dist.steps import configured, make_trainer

from megatron_brorl.checkpoints import training as checkpoint
from megatron_brorl.checkpoints.training import Save

SMALL = {"rollout": {"n": 4, "prompts": 2}, "theory": {"every": 0}}


def trainer_of(model, processes, tmp_path, **train):
    changes = {**SMALL, "run": {"seed": 3, "dir": str(tmp_path)}, "train": {"checkpoint_every": 1, **train}}
    trainer = make_trainer(model[0], processes, configured(changes), fakes.Engine())
    trainer.held_out = []
    return trainer


def checkpoint_names(tmp_path):
    return sorted(p.name for p in (tmp_path / "checkpoints").iterdir())


@pytest.fixture
def writes(monkeypatch):
    """Record each write of a checkpoint: its step and whether it ran in the main thread.

    A function in `before[step]` is called before that step's checkpoint is written.
    """
    write = Save.write

    def record_and_write(self, group=None):
        step = int(self.target.name.removeprefix("step_"))
        record_and_write.saves.append((step, threading.current_thread() is threading.main_thread()))
        if step in record_and_write.before:
            record_and_write.before[step]()
        write(self, group)

    record_and_write.before = {}
    record_and_write.saves = []
    monkeypatch.setattr(Save, "write", record_and_write)
    return record_and_write


def test_only_the_last_save_is_waited_for(processes, model, tmp_path, writes):
    trainer = trainer_of(model, processes, tmp_path, steps=3)
    assert trainer.run(None, fakes.Notes(), lambda: False)
    assert writes.saves == [(1, False), (2, False), (3, True)]
    assert not trainer.background_saver.under_way
    assert checkpoint_names(tmp_path) == ["latest", "step_00000002", "step_00000003"]


def test_stop_waits_for_the_background_save_and_saves(processes, model, tmp_path, writes):
    """Stop after the second step, while the first step's checkpoint is still being written."""
    stop_requested = threading.Event()
    writes.before[1] = stop_requested.wait
    trainer = trainer_of(model, processes, tmp_path, steps=9)

    def stop():
        if trainer.state.step == 2:
            stop_requested.set()
        return stop_requested.is_set()

    assert not trainer.run(None, fakes.Notes(), stop)
    assert writes.saves == [(1, False), (2, True)]
    assert checkpoint.find(tmp_path / "checkpoints").name == "step_00000002"


def test_refused_background_save_is_repeated(processes, model, tmp_path, writes, monkeypatch):
    """The run continues, logs a warning, and saves after the next step although no checkpoint is due."""
    trainer = trainer_of(model, processes, tmp_path, steps=4, checkpoint_every=2)
    progress = fakes.Notes()
    refuse_checkpoint(monkeypatch, trainer, step=2)
    train_step = trainer.train_step

    def train_step_after_the_save():
        if trainer.background_saver.under_way:
            trainer.background_saver._thread.join()
        return train_step()

    trainer.train_step = train_step_after_the_save
    assert trainer.run(None, progress, lambda: False)
    assert [s for s, _ in writes.saves] == [2, 3, 4]
    (warning,) = (note for note in progress.notes if note.startswith("warning: "))
    path = tmp_path / "checkpoints" / "step_00000002"
    assert warning.startswith(f"warning: {path}: cannot be written: {os.strerror(errno.ENOSPC)}")
    assert warning.endswith("saving the current state instead")
    assert checkpoint_names(tmp_path) == ["latest", "step_00000003", "step_00000004"]


def test_error_waits_for_the_background_save(processes, model, tmp_path, writes):
    failed = threading.Event()
    writes.before[2] = failed.wait
    trainer = trainer_of(model, processes, tmp_path, steps=9)
    train_step = trainer.train_step
    # The third step fails, and lets the write of the second step's checkpoint continue.
    trainer.train_step = lambda: train_step() if trainer.state.step < 2 else (failed.set(), 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run(None, fakes.Notes(), lambda: False)
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_00000002\n"
    assert json.loads((tmp_path / "checkpoints" / "step_00000002" / "run.json").read_text())["step"] == 2
