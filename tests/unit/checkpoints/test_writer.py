"""Files of a checkpoint on a disk that refuses a write in the middle of a tensor."""

from __future__ import annotations

import errno
import hashlib
import io
import os

import pytest
import torch

from megatron_brorl.checkpoints import writer


class Disk(io.FileIO):
    """A file, one of whose writes is refused."""

    at = 0
    written = 0

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
    monkeypatch.setattr(writer, "open", lambda p, _: io.BufferedWriter(Disk(p, "w")), raising=False)
    monkeypatch.setattr(Disk, "written", 0)
    return Disk


@pytest.mark.parametrize("at", [1, 2, 5, 9])
def test_a_refused_write_is_an_error_of_the_disk(disk, monkeypatch, tmp_path, at):
    """torch raises a RuntimeError when it closes an archive after a refused write."""
    monkeypatch.setattr(disk, "at", at)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        writer.write_verified(tmp_path / "x", three_tensors)
    assert disk.written >= at


def test_the_digest_is_that_of_the_file(disk, tmp_path):
    assert writer.write_verified(tmp_path / "x", three_tensors) == (
        hashlib.sha256((tmp_path / "x").read_bytes()).hexdigest(),
        "filled",
    )
    assert disk.written == 9


def test_other_errors_are_not_changed(tmp_path):
    def fails(stream):
        raise RuntimeError("other")

    with pytest.raises(RuntimeError, match="other"):
        writer.write_verified(tmp_path / "x", fails)
