"""Tests of checkpoints that are written in the background, and of errors of the disk."""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import pathlib
import threading
from datetime import timedelta
from hashlib import sha256
from pathlib import Path

import pytest
from conversions import flip_a_bit, names, raise_disk_full, save_checkpoint
from full_disk import file_size_limit

from megatron_brorl.checkpoints import folders, hugging_face, writer
from megatron_brorl.checkpoints import training as checkpoint
from megatron_brorl.checkpoints.training import BackgroundSaver
from megatron_brorl.errors import UserError

SOON = timedelta(seconds=60)


@pytest.fixture
def begin(actor_state, tmp_path):
    options = {"run": {}, "files": {"own": b"mine"}, "copy": True}
    return lambda step, keep=1: checkpoint.begin(tmp_path, step, [actor_state], keep=keep, **options)


class Held:
    """Block each save before it writes a file whose name ends with `name`, until `go` is set."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str) -> None:
        self.reached = threading.Event()
        self.go = threading.Event()
        write = writer.write_verified

        def blocked_write(path, fill):
            if path.name.endswith(name):
                self.reached.set()
                assert self.go.wait(60)
            return write(path, fill)

        for module in (writer, folders, checkpoint):
            patch.setattr(module, "write_verified", blocked_write)


@pytest.mark.parametrize("name", ["1.distcp", "own", "manifest.json"])
def test_latest_names_the_old_checkpoint_until_the_new_one_is_complete(begin, tmp_path, monkeypatch, name):
    """The files while the save is blocked are those that a SIGKILL would leave."""
    first = begin(1)
    first.write()
    first.raise_if_failed()
    held = Held(monkeypatch, name)
    saving = BackgroundSaver()
    saving.start(begin(2), SOON)
    assert held.reached.wait(60)

    assert saving.busy()
    assert saving.under_way
    assert names(tmp_path) == [".step_00000002.writing", "latest", "step_00000001"]
    assert checkpoint.find(tmp_path) == tmp_path / "step_00000001"

    held.go.set()
    saving.wait()
    assert not saving.under_way
    assert names(tmp_path) == ["latest", "step_00000002"]
    assert checkpoint.find(tmp_path) == tmp_path / "step_00000002"
    assert (tmp_path / "step_00000002" / "own").read_bytes() == b"mine"
    assert saving.seconds_to_come() == saving.write_s > 0


@pytest.mark.parametrize("name", [".distcp", "manifest.json"])
def test_a_checkpoint_that_reads_back_differently_is_rejected(begin, tmp_path, monkeypatch, name):
    saving = BackgroundSaver()
    saving.start(begin(1), SOON)
    saving.wait()
    fsync = os.fsync
    flipped = []

    def flip(file: int) -> None:
        fsync(file)
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        if path.name.endswith(name) and not flipped:
            flipped.append(path)
            flip_a_bit(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", flip)
        saving.start(begin(2), SOON)
        with pytest.raises(checkpoint.NotWritten, match=r"step_00000002: cannot be written: .* reads back as other"):
            saving.wait()
    assert flipped
    assert names(tmp_path) == ["latest", "step_00000001"]
    assert checkpoint.find(tmp_path) == tmp_path / "step_00000001"
    saving.start(begin(2), SOON)
    saving.wait()
    assert checkpoint.find(tmp_path) == tmp_path / "step_00000002"


def test_the_manifest_has_the_hash_of_every_file(begin, tmp_path):
    save = begin(1)
    save.write()
    folder = tmp_path / "step_00000001"
    manifest = json.loads((folder / "manifest.json").read_text())
    digests = {p.name: sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.name != "manifest.json"}
    assert manifest == digests
    expected = {"own", "run.json", "common.pt", ".metadata", "metadata.json", "__0_0.distcp", "__0_1.distcp"}
    assert digests.keys() == expected


def test_a_failed_save_is_a_warning_if_the_run_ends_with_an_error(begin, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "write_verified", raise_disk_full)
    saving = BackgroundSaver()
    warnings: list[str] = []
    saving.start(begin(1), SOON)
    saving.wait_on_error(warnings.append)
    assert warnings == [f"warning: {tmp_path / 'step_00000001'}: cannot be written: {os.strerror(errno.ENOSPC)}"]
    assert names(tmp_path) == []


@pytest.fixture
def save(actor_state, tmp_path):
    return lambda step: save_checkpoint(tmp_path, step, actor_state, keep=2)


def break_files(patch: pytest.MonkeyPatch, folder: str, name: str, mode: str, code: int) -> None:
    """Make open fail for files below `folder` whose path ends with `name`. mode: "r" or "w"."""
    original = io.open

    def opened(file, *args, **kwargs):
        is_broken = folder in str(file) and str(file).endswith(name)
        if is_broken and mode in (args[0] if args else kwargs.get("mode", "r")):
            raise OSError(code, os.strerror(code), str(file))
        return original(file, *args, **kwargs)

    for owner in (builtins, io, getattr(pathlib, "_NormalAccessor", io)):  # Python 3.10's pathlib has its own.
        patch.setattr(owner, "open", staticmethod(opened))


def test_a_full_disk_leaves_the_folder_unchanged(save, tmp_path):
    """torch itself raises RuntimeError when it closes its archive after a failed write."""
    save(1)
    message = f"^{tmp_path / 'step_00000002'}: cannot be written: .*{os.strerror(errno.EFBIG)}"
    with file_size_limit(100_000), pytest.raises(checkpoint.NotWritten, match=message):
        save(2)
    assert names(tmp_path) == ["latest", "step_00000001"]
    assert save(2) == checkpoint.find(tmp_path)


@pytest.mark.parametrize("name", [".metadata", "manifest.json"])
def test_a_read_error_is_not_reported_as_damage(save, actor_state, tmp_path, monkeypatch, capfd, name):
    """The message must not advise to delete the checkpoint, because it may be intact."""
    directory = save(1)

    def read():
        checkpoint.load(checkpoint.find(tmp_path) if name == "manifest.json" else directory, [actor_state])

    with monkeypatch.context() as patch:
        break_files(patch, "step_00000001", name, mode="r", code=errno.EIO)
        # An OSError is reported by each rank, because the other ranks may have succeeded.
        with pytest.raises(UserError if name == ".metadata" else OSError, match=os.strerror(errno.EIO)) as error:
            read()
    assert str(directory) in str(error.value)
    assert "delete" not in str(error.value)
    assert "Traceback" not in capfd.readouterr().err
    read()


def test_a_write_error_names_the_directory(tmp_path):
    """The OSError of a write to an open file has no file name."""
    target = tmp_path / "model"

    def write():
        with hugging_face.atomic_directory(target) as aside:
            (aside / "x").write_text("x")
            raise_disk_full()

    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as error:
        write()
    assert error.value.filename == str(target)
    assert list(tmp_path.iterdir()) == []
