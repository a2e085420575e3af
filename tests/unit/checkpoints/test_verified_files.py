"""A disk that refuses a write in the midst of a tensor, half of which it has taken."""

from __future__ import annotations

import errno
import hashlib
import io
import os

import pytest
import torch

from megatron_brorl.checkpoints import verified_files


class Disk(io.FileIO):
    """A file, one of whose writes is refused."""

    at, written = 0, 0

    def write(self, data):
        Disk.written += 1
        if Disk.written == Disk.at:
            half = memoryview(data).cast("B")
            super().write(half[: len(half) // 2])
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().write(data)


def three_tensors(stream):
    for i in range(3):
        torch.save(torch.arange(3000.0) + i, stream)
    return "filled"


@pytest.fixture
def disk(monkeypatch):
    monkeypatch.setattr(verified_files, "open", lambda p, _: io.BufferedWriter(Disk(p, "w")), raising=False)
    monkeypatch.setattr(Disk, "written", 0)
    return Disk


@pytest.mark.parametrize("at", range(1, 10))
def test_a_refused_write_is_an_error_of_the_disk(disk, monkeypatch, tmp_path, at):
    """Where torch closes the archive of which a write was refused it raises a RuntimeError in place of that."""
    monkeypatch.setattr(disk, "at", at)
    refusals = verified_files.Refusals()
    with refusals.caught():
        verified_files.fill(tmp_path / "x", three_tensors)
    assert refusals.told() == os.strerror(errno.EIO)
    assert disk.written >= at


def test_all_writes_taken(disk, tmp_path):
    assert verified_files.fill(tmp_path / "x", three_tensors) == (
        hashlib.sha256((tmp_path / "x").read_bytes()).hexdigest(),
        "filled",
    )
    assert disk.written == 9  # of which the cases above refuse each


def test_an_error_of_torch_is_none_of_the_disk(tmp_path):
    def fails(stream):
        raise RuntimeError("not of the disk")

    with pytest.raises(RuntimeError, match="not of the disk"):
        verified_files.fill(tmp_path / "x", fails)
