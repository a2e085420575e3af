"""A disk that refuses reads or writes: an error of one line, nothing half-written stays, and the run can continue."""

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
    """Saving is refused in one line, and leaves the folder as it was."""
    before = sorted(p.name for p in root.iterdir())
    with pytest.raises(checkpoint.NotWritten) as error:
        save(step)
    assert reason in str(error.value)
    assert str(error.value).startswith(f"{root / f'step_{step:08d}'}: cannot be written: ")
    assert sorted(p.name for p in root.iterdir()) == before


@pytest.mark.parametrize("name", [".distcp", ".metadata", "manifest.json"])
def test_full_while_a_file_is_written(save, tmp_path, monkeypatch, name):
    """Quotas are not in what a file system says is free."""
    save(1)

    def refuse(path) -> bool:
        return name in Path(str(path)).name and "step_00000002" in str(path)

    with monkeypatch.context() as m:
        _break_writes(m, refuse)
        fails(save, 2, tmp_path, os.strerror(errno.ENOSPC))
    assert save(2) == checkpoint.find(tmp_path)


@pytest.mark.parametrize("name", [".metadata", "manifest.json"])
def test_what_the_disk_does_not_give_back_is_not_called_damaged(save, part, tmp_path, monkeypatch, capfd, name):
    """Nobody is told to delete a checkpoint that nothing is known of."""
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
    # Other ranks may have read theirs: a UserError would be told by the first one alone.
    assert isinstance(error.value, OSError) == (name != ".metadata")
    assert str(directory) in str(error.value)
    assert "delete" not in str(error.value)
    assert "Traceback" not in capfd.readouterr().err
    read()


def _break_writes(m, refuse) -> None:
    """Whatever opens a file of that name for writing is refused: by open, by Path.open, and by torch.save."""
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


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    """Of an open file a full disk's error tells no name."""
    target = tmp_path / "model"

    def write():
        with hugging_face.written_aside(target) as aside:
            (aside / "x").write_text("x")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as error:
        write()
    assert error.value.filename == str(target)
    assert list(tmp_path.iterdir()) == []
