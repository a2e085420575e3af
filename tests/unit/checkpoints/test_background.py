"""A checkpoint on its way: nothing points to it before all of it is on the disk, verified, whatever happens."""

from __future__ import annotations

import errno
import json
import os
import threading
from datetime import timedelta
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from megatron_brorl.checkpoints import training as checkpoint
from megatron_brorl.checkpoints import verified_files
from megatron_brorl.checkpoints.background import Background
from megatron_brorl.checkpoints.host_copies import HostCopies
from megatron_brorl.config.schema import OptimConfig
from megatron_brorl.model_shape import read_shape
from megatron_brorl.ops.backend import backend
from megatron_brorl.train.worker import StageOptions, Worker

SOON = timedelta(seconds=60)


@pytest.fixture(scope="module")
def part(processes, model):
    options = StageOptions(100, backend("fused", torch.device("cpu")))
    worker = Worker(read_shape(model[0]), processes, options, OptimConfig())
    worker.load_hf(model[0])
    return checkpoint.Part("", worker.actor, worker.optimizer)


@pytest.fixture
def begin(part, tmp_path):
    return lambda step, keep=1: checkpoint.begin(tmp_path, step, [part], {}, keep, {"own": b"mine"}, HostCopies())


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


class Held:
    """Saves that stop where a file of this name is about to be written, until they are let go."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        fill = verified_files.fill

        def held(path, filler):
            if path.name.endswith(name):
                self.reached.set()
                assert self.go.wait(60)
            return fill(path, filler)

        patch.setattr(verified_files, "fill", held)


@pytest.mark.parametrize("name", ["1.distcp", "own", ".metadata", "run.json", "manifest.json"])
def test_latest_is_the_old_one_until_all_of_the_new_one_is_there(begin, tmp_path, monkeypatch, name):
    """A SIGKILL at this moment leaves these files: a restart goes on from the old one, and its first save tidies up."""
    first = begin(1)
    first.write()
    first.agree()
    held, saving = Held(monkeypatch, name), Background()
    saving.start(begin(2), SOON)
    assert held.reached.wait(60)

    assert saving.busy()
    assert saving.under_way
    assert names(tmp_path) == [".step_00000002.writing", "latest", "step_00000001"]
    assert checkpoint.find(tmp_path) == tmp_path / "step_00000001"

    held.go.set()
    saving.settle()
    assert not saving.under_way
    assert names(tmp_path) == ["latest", "step_00000002"]
    assert checkpoint.find(tmp_path) == tmp_path / "step_00000002"
    assert (tmp_path / "step_00000002" / "own").read_bytes() == b"mine"
    assert saving.seconds_to_come() == saving.write_s > 0


def test_what_a_killed_one_left_goes_with_the_next(begin, tmp_path):
    abandoned = begin(1)
    abandoned.shards.write(abandoned.aside)
    assert names(tmp_path) == [".step_00000001.writing"]
    assert checkpoint.find(tmp_path) is None
    saving = Background()
    saving.start(begin(2), SOON)
    saving.settle()
    assert names(tmp_path) == ["latest", "step_00000002"]


@pytest.mark.parametrize("name", [".distcp", "own", ".metadata", "manifest.json"])
def test_what_reads_back_otherwise_is_not_pointed_to(begin, tmp_path, monkeypatch, name):
    """A disk that takes every byte and keeps another."""
    saving = Background()
    saving.start(begin(1), SOON)
    saving.settle()
    fsync, flipped = os.fsync, []

    def flip(file: int) -> None:
        fsync(file)
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        if path.name.endswith(name) and not flipped:
            flipped.append(path)
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", flip)
        saving.start(begin(2), SOON)
        with pytest.raises(checkpoint.NotWritten, match=r"step_00000002: cannot be written: .* reads back as other"):
            saving.settle()
    assert flipped
    assert names(tmp_path) == ["latest", "step_00000001"]
    assert checkpoint.find(tmp_path) == tmp_path / "step_00000001"
    saving.start(begin(2), SOON)
    saving.settle()
    assert checkpoint.find(tmp_path) == tmp_path / "step_00000002"


def test_the_manifest_holds_what_was_meant(begin, tmp_path):
    """Its hashes are those of the files, recomputed here, and no file is without one."""
    save = begin(1)
    save.write()
    folder = tmp_path / "step_00000001"
    manifest = json.loads((folder / "manifest.json").read_text())
    there = {p.name: sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.name != "manifest.json"}
    assert manifest == there
    assert {"own", "run.json", "common.pt", ".metadata", "metadata.json", "__0_0.distcp", "__0_1.distcp"} == set(there)


def test_a_mistake_of_the_thread_is_raised_where_the_run_hears_it(begin, monkeypatch):
    saving, save = Background(), begin(1)
    monkeypatch.setattr(save.shards, "write", lambda _: 1 / 0)
    saving.start(save, SOON)
    saving._thread.join()
    with pytest.raises(ZeroDivisionError):
        saving.busy()


def test_an_error_of_the_run_cuts_nothing_off(begin, tmp_path, monkeypatch):
    """Nothing is raised beside it; what the disk refused is told."""
    held, saving, told = Held(monkeypatch, ".metadata"), Background(), []
    saving.start(begin(1), SOON)
    assert held.reached.wait(60)
    threading.Timer(0.05, held.go.set).start()
    saving.finish(told.append)
    assert checkpoint.find(tmp_path) == tmp_path / "step_00000001"
    assert told == []

    def full(_path, _filler):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(verified_files, "fill", full)
    saving.start(begin(2), SOON)
    saving.finish(told.append)
    assert told == [f"warning: {tmp_path / 'step_00000002'}: cannot be written: {os.strerror(errno.ENOSPC)}"]
    assert names(tmp_path) == ["latest", "step_00000001"]


def test_its_thread_gives_way_to_the_run(begin, monkeypatch):
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    own, seen, fill = priority(), [], verified_files.fill
    monkeypatch.setattr(verified_files, "fill", lambda *given: (seen.append(priority()), fill(*given))[1])
    saving = Background()
    saving.start(begin(1), SOON)
    saving.settle()
    assert set(seen) == {min(19, own + 10)}
    assert priority() == own


def test_copies_are_of_one_state_at_a_time():
    """Memory is used again for what has its shape and type, and what a state has no use for is given back."""
    copies, first = HostCopies(), [torch.arange(6.0).view(2, 3), torch.ones(4)]
    copies.begin()
    taken = [copies.take(t) for t in first]
    copies.end()
    first[0].zero_()
    assert torch.equal(taken[0], torch.arange(6.0).view(2, 3))
    places = {t.data_ptr() for t in taken}
    assert copies.bytes() == 4 * 10

    copies.begin()
    again = copies.take(torch.full((2, 3), 7.0).t().contiguous().t())  # of other strides
    copies.end()
    assert again.data_ptr() in places
    assert again.is_contiguous()
    assert torch.equal(again, torch.full((2, 3), 7.0))
    assert copies.bytes() == 4 * 6
    copies.begin()
    assert copies.take(torch.zeros(2, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16
    copies.end()
    assert copies.bytes() == 2 * 6
