"""Tests of write_verified, with writes that fail in the middle of a tensor."""

from __future__ import annotations

import errno
import hashlib
import io
import os

import pytest
import torch

from megatron_brorl.checkpoints import writer


class Disk(io.FileIO):
    """A file whose write number `at` fails halfway."""

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


@pytest.mark.parametrize("at", [1, 5, 9])
def test_a_failed_write_raises_oserror(disk, monkeypatch, tmp_path, at):
    """torch itself would raise RuntimeError when it closes the archive after a failed write."""
    monkeypatch.setattr(disk, "at", at)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        writer.write_verified(tmp_path / "x", three_tensors)
    assert disk.written >= at


def test_the_digest_equals_that_of_the_file(disk, tmp_path):
    digest, result = writer.write_verified(tmp_path / "x", three_tensors)
    assert (digest, result) == (hashlib.sha256((tmp_path / "x").read_bytes()).hexdigest(), "filled")
    assert disk.written == 9


def test_other_errors_are_not_changed(tmp_path):
    def fails(stream):
        raise RuntimeError("other")

    with pytest.raises(RuntimeError, match="other"):
        writer.write_verified(tmp_path / "x", fails)
