"""Tests of disk errors: one line for the user, no partial files, and the run can continue."""

from __future__ import annotations

import builtins
import errno
import io
import os
from pathlib import Path

import pytest
import torch
from conversions import save_checkpoint

from megatron_brorl.checkpoints import hugging_face
from megatron_brorl.checkpoints import training as checkpoint
from megatron_brorl.errors import UserError


@pytest.fixture
def save(part, tmp_path):
    return lambda step: save_checkpoint(tmp_path, step, part, keep=2)


def fails(save, step: int, root: Path, reason: str) -> None:
    """Check that saving raises NotWritten with this reason, and does not change the folder."""
    before = sorted(p.name for p in root.iterdir())
    with pytest.raises(checkpoint.NotWritten) as error:
        save(step)
    assert reason in str(error.value)
    assert str(error.value).startswith(f"{root / f'step_{step:08d}'}: cannot be written: ")
    assert sorted(p.name for p in root.iterdir()) == before


@pytest.mark.parametrize("name", [".distcp", ".metadata", "manifest.json"])
def test_a_full_disk_during_a_save_leaves_the_folder_unchanged(save, tmp_path, monkeypatch, name):
    save(1)

    def refuse(path) -> bool:
        return name in Path(str(path)).name and "step_00000002" in str(path)

    with monkeypatch.context() as m:
        _break_writes(m, refuse)
        fails(save, 2, tmp_path, os.strerror(errno.ENOSPC))
    assert save(2) == checkpoint.find(tmp_path)


@pytest.mark.parametrize("name", [".metadata", "manifest.json"])
def test_a_read_error_is_not_reported_as_damage(save, part, tmp_path, monkeypatch, capfd, name):
    """The message must not advise to delete the checkpoint, because it may be intact."""
    directory = save(1)
    call = io.open

    def refusing(file, *args, **kwargs):
        if str(file).endswith(f"step_00000001/{name}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))
        return call(file, *args, **kwargs)

    def read():
        found = checkpoint.find(tmp_path) if name == "manifest.json" else directory
        checkpoint.load(found, [part])

    with monkeypatch.context() as m:
        for module in (builtins, io):
            m.setattr(module, "open", refusing)
        with pytest.raises((UserError, OSError)) as error:
            read()
    assert os.strerror(errno.EIO) in str(error.value)
    # An OSError is reported by each rank, because the other ranks may have succeeded.
    assert isinstance(error.value, OSError) == (name != ".metadata")
    assert str(directory) in str(error.value)
    assert "delete" not in str(error.value)
    assert "Traceback" not in capfd.readouterr().err
    read()


def _break_writes(m, refuse) -> None:
    """Make open, Path.open and torch.save fail for file names that `refuse` accepts."""
    for module in (builtins, io):
        m.setattr(module, "open", _refusing(open, refuse))
    m.setattr(torch, "save", _refusing(torch.save, refuse, 1))


def _refusing(call, refuse, place=0):
    def called(*args, **kwargs):
        mode = args[1] if place == 0 and len(args) > 1 else kwargs.get("mode", "w" if place else "r")
        if refuse(args[place]) and "w" in str(mode):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return call(*args, **kwargs)

    return called


def test_a_write_error_names_the_directory(tmp_path):
    """The OSError of a write to an open file has no file name."""
    target = tmp_path / "model"

    def write():
        with hugging_face.atomic_directory(target) as aside:
            (aside / "x").write_text("x")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as error:
        write()
    assert error.value.filename == str(target)
    assert list(tmp_path.iterdir()) == []
