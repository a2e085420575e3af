"""When a run saves, waits for what it saves, and makes up for what the disk refused."""

from __future__ import annotations

import errno
import json
import os
import threading
from types import SimpleNamespace

import fakes
import pytest
from dist.steps import _Silent, configured, make_trainer

from megatron_brorl.checkpoints import training as checkpoint
from megatron_brorl.checkpoints.training import BackgroundSaver, Save
from megatron_brorl.metrics import MetricsWriter, read_metrics
from megatron_brorl.train import run

SMALL = {"rollout": {"n": 4, "prompts": 2}, "theory": {"every": 0}}


class Told(_Silent):
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


def trainer_of(model, processes, tmp_path, **train):
    changes = {**SMALL, "run": {"seed": 3, "dir": str(tmp_path)}, "train": {"checkpoint_every": 1, **train}}
    trainer = make_trainer(model[0], processes, configured(changes), fakes.Engine())
    trainer.held_out = []
    return trainer


def steps(tmp_path):
    return sorted(p.name for p in (tmp_path / "checkpoints").iterdir())


@pytest.fixture
def writes(monkeypatch):
    """Every writing of a checkpoint: its step, whether in the run's own thread, and what `before` does first."""
    seen, write = [], Save.write

    def watched(self, group=None):
        step = int(self.target.name.removeprefix("step_"))
        seen.append((step, threading.current_thread() is threading.main_thread()))
        if step in watched.before:
            watched.before[step]()
        write(self, group)

    watched.before, watched.seen = {}, seen
    monkeypatch.setattr(Save, "write", watched)
    return watched


def full():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_last_one_is_waited_for_and_the_others_are_not(processes, model, tmp_path, writes):
    trainer = trainer_of(model, processes, tmp_path, steps=3)
    assert trainer.run(None, _Silent(), lambda: False)
    assert writes.seen == [(1, False), (2, False), (3, True)]
    assert not trainer.saving.under_way
    assert steps(tmp_path) == ["latest", "step_00000002", "step_00000003"]


def test_the_key_makes_the_run_wait(processes, model, tmp_path, writes):
    assert trainer_of(model, processes, tmp_path, steps=2, checkpoint_async=False).run(None, _Silent(), lambda: False)
    assert writes.seen == [(1, True), (2, True)]


def test_a_stop_waits_for_what_is_under_way_and_saves(processes, model, tmp_path, writes):
    """Asked after the second step, while the first one's checkpoint is held up."""
    writes.before[1] = lambda: threading.Event().wait(0.3)
    trainer = trainer_of(model, processes, tmp_path, steps=9)
    assert not trainer.run(None, _Silent(), lambda: trainer.state.step == 2)
    assert writes.seen == [(1, False), (2, True)]
    assert checkpoint.find(tmp_path / "checkpoints").name == "step_00000002"


def test_a_second_one_waits_and_says_how_long(processes, model, tmp_path, monkeypatch):
    """By a clock on which taking the state takes 2 s and every wait 5 s, told with the step that follows."""
    clock, events, make, settle, write = [100.0], [], checkpoint.plan, BackgroundSaver.settle, Save.write

    def planned(*arguments):
        clock[0] += 2.0
        return make(*arguments)

    def settled(self):
        clock[0] += 5.0 if self.under_way else 0.0
        settle(self)

    def written(self, group=None):
        events.append(("begins", self.target.name))
        write(self, group)
        events.append(("ends", self.target.name))

    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: clock[0], time=lambda: 0.0))
    monkeypatch.setattr(checkpoint, "plan", planned)
    monkeypatch.setattr(BackgroundSaver, "settle", settled)
    monkeypatch.setattr(Save, "write", written)
    writer = MetricsWriter(tmp_path)
    assert trainer_of(model, processes, tmp_path, steps=4).run(writer, _Silent(), lambda: False)
    writer.close()

    times = [row["time"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert [t["checkpoint"] for t in times] == [0, 2, 2, 2]
    assert [t["checkpoint_wait"] for t in times] == [0, 0, 5, 5]
    assert events == [(what, f"step_{step:08d}") for step in (1, 2, 3, 4) for what in ("begins", "ends")]


def test_what_the_disk_refused_meanwhile_is_made_up_for(processes, model, tmp_path, writes, monkeypatch):
    """The run goes on, says so, and saves at its next step, where no checkpoint was due."""
    trainer, told = trainer_of(model, processes, tmp_path, steps=4, checkpoint_every=2), Told()
    make = checkpoint.plan

    def broken(*arguments):
        shards = make(*arguments)
        if trainer.state.step == 2:
            monkeypatch.setattr(shards, "write", lambda _: full())
        return shards

    monkeypatch.setattr(checkpoint, "plan", broken)
    step = trainer.train_step
    trainer.train_step = lambda: (trainer.saving._thread.join() if trainer.saving.under_way else None, step())[1]
    assert trainer.run(None, told, lambda: False)
    assert [s for s, _ in writes.seen] == [2, 3, 4]
    (said,) = (note for note in told.notes if note.startswith("warning: "))
    place = tmp_path / "checkpoints" / "step_00000002"
    assert said.startswith(f"warning: {place}: cannot be written: {os.strerror(errno.ENOSPC)}")
    assert said.endswith("the run goes on and saves its present state")
    assert steps(tmp_path) == ["latest", "step_00000003", "step_00000004"]


def test_an_error_waits_for_what_is_under_way(processes, model, tmp_path, writes):
    writes.before[2] = lambda: threading.Event().wait(0.3)
    trainer = trainer_of(model, processes, tmp_path, steps=9)
    step = trainer.train_step
    trainer.train_step = lambda: step() if trainer.state.step < 2 else 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.run(None, _Silent(), lambda: False)
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_00000002\n"
    assert json.loads((tmp_path / "checkpoints" / "step_00000002" / "run.json").read_text())["step"] == 2
