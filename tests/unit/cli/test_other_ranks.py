"""Tests of errors that a lost rank causes in the other ranks, and of the environment of a rank."""

from __future__ import annotations

import os

import pytest

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


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (CLOSED, "another rank has died"),
        (LATE, "did not respond in parallel"),
        (MISSED, "waited for ranks 1, 3: dead or too slow"),
        (WAITED, "another rank has died"),
    ],
)
def test_a_lost_rank_is_reported_in_one_line(monkeypatch, capsys, text, told):
    def fails(_):
        raise RuntimeError(text)

    monkeypatch.setattr(cli, "_run_ranks", fails)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "run.toml"])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("brorl: rank 1: ")
    assert told in said
    assert said.count("\n") == 1


def test_an_error_of_two_files_names_the_target(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(cli, "_run_ranks", lambda _: os.rename(tmp_path, __file__))
    with pytest.raises(SystemExit, match="2"):
        cli.main(["train", "run.toml"])
    assert capsys.readouterr().err.startswith(f"brorl: rank 0: {__file__}: ")


def test_other_errors_keep_their_traceback(monkeypatch):
    def fails(_):
        raise RuntimeError("shape [3] is invalid for input of size 2")

    monkeypatch.setattr(cli, "_run_ranks", fails)
    with pytest.raises(RuntimeError, match="invalid for input"):
        cli.main(["train", "run.toml"])


@pytest.mark.parametrize(
    ("parallel", "given", "expected"),
    [
        (("pipeline=2", "expert=2"), None, None),
        (("tensor=2",), None, "1"),
        (("context=2",), None, "1"),
        (("tensor=2",), "32", "32"),
    ],
)
def test_kernels_start_in_order_where_a_layer_communicates(tmp_path, monkeypatch, parallel, given, expected):
    monkeypatch.setattr(os, "environ", {"CUDA_DEVICE_MAX_CONNECTIONS": given} if given else {})
    found = []
    monkeypatch.setattr(cli.signals, "install", lambda **_: None)
    monkeypatch.setattr(train, "run", lambda _: found.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")) or 0)
    (tmp_path / "run.toml").write_text(f'run.dir = "{tmp_path / "run"}"\nmodel.path = "{tmp_path}"\n')
    changes = [f"parallel.{change}" for change in parallel] + ["train.share_prompt=false"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", str(tmp_path / "run.toml"), *changes])
    assert (ended.value.code, found) == (0, [expected])
