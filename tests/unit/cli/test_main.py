"""Tests of errors that a lost rank causes in the other ranks, and of the environment of a rank."""

from __future__ import annotations

import errno
import os

import pytest
from command_line import output

from megatron_brorl.cli import main as cli
from megatron_brorl.cli import train

CLOSED = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[127.0.0.1]:438. This is typically caused by a remote worker crashing."
)
LATE = "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1000ms for recv operation"
MISSED = "[Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 1890000 ms"
WAITED = (
    "Rank 1 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0. Please "
    "check rank 0 logs for faulty rank. \n Original exception: \n[pair.cc:553] Connection closed by peer [127.0.0.1]:4"
)


def make_training_raise(monkeypatch, error):
    def fail(_):
        raise error

    monkeypatch.setattr(cli, "_run_ranks", fail)
    monkeypatch.setenv("RANK", "1")


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (CLOSED, "another rank has died"),
        (LATE, "did not respond in parallel"),
        (MISSED, "waited for ranks 1, 3"),
        (WAITED, "another rank has died"),
    ],
)
def test_a_lost_rank_is_reported_in_one_line(monkeypatch, capsys, text, cause):
    make_training_raise(monkeypatch, RuntimeError(text))
    (line,) = output(capsys, "train", "run.toml", code=1).splitlines()
    assert line.startswith("brorl: rank 1: ")
    assert cause in line


def test_errors_of_files_name_the_target_and_others_keep_their_traceback(monkeypatch, capsys):
    make_training_raise(monkeypatch, OSError(errno.ENOSPC, "No space left on device", "/a", None, "/b"))
    assert output(capsys, "train", "run.toml", code=2).startswith("brorl: rank 1: /b: ")
    make_training_raise(monkeypatch, RuntimeError("shape [3] is invalid for input of size 2"))
    with pytest.raises(RuntimeError, match="invalid for input"):
        cli.main(["train", "run.toml"])


@pytest.mark.parametrize(
    ("parallel", "variable", "expected"),
    [
        (("pipeline=2", "expert=2"), None, None),
        (("tensor=2",), None, "1"),
        (("context=2",), None, "1"),
        (("tensor=2",), "32", "32"),
    ],
)
def test_kernels_start_in_order_where_a_layer_communicates(tmp_path, monkeypatch, capsys, parallel, variable, expected):
    monkeypatch.setattr(os, "environ", {"CUDA_DEVICE_MAX_CONNECTIONS": variable} if variable else {})
    connections = []

    def run(_):
        connections.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
        return 0

    monkeypatch.setattr(cli.signals, "install", lambda **_: None)
    monkeypatch.setattr(train, "run", run)
    (tmp_path / "run.toml").write_text(f'run.dir = "{tmp_path / "run"}"\nmodel.path = "{tmp_path}"\n')
    overrides = [f"parallel.{change}" for change in parallel] + ["train.share_prompt=false"]
    output(capsys, "train", tmp_path / "run.toml", *overrides)
    assert connections == [expected]
