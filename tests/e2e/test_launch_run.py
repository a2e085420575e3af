"""Tests of the processes of a run: their listening sockets, their end if the launcher is killed, and user errors."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import select
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from e2e.runs import brorl, lines_until, start, wait_for

DOUBLE = Path(__file__).parents[1] / "contract" / "double"
OPTIONS = [
    *("rollout.engine=trtllm", "engine.tensor=2", "engine.cuda_graphs=false", "reward.strict=false", "rollout.n=4"),
    *("train.steps=5000", "train.checkpoint_every=1", "evaluate.every=0", "data.held_out=[]"),
]


def processes(launcher: Any) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(launcher.pid)
        return [process, *process.children(recursive=True)]
    return []


def listening(launcher: Any) -> Iterator[str]:
    """Yield the addresses on which any process of the run accepts connections or datagrams."""
    for process in processes(launcher):
        with contextlib.suppress(psutil.Error):
            for connection in process.net_connections("inet"):
                # A datagram socket with a peer, such as a name server, receives only from that peer.
                is_datagram = connection.type == socket.SOCK_DGRAM and connection.laddr and not connection.raddr
                if is_datagram or connection.status == psutil.CONN_LISTEN:
                    yield connection.laddr.ip


@pytest.fixture
def begin(tmp_path) -> Iterator[Callable[..., Any]]:
    """Return runs.start, and kill the processes that a failed test leaves."""
    runs = []

    def begin_(*arguments: Any, **environment: str) -> Any:
        runs.append(start(*arguments, **environment))
        return runs[-1]

    yield begin_
    for process in psutil.process_iter(["cmdline"]):
        if f"run.dir={tmp_path}" in (process.info["cmdline"] or []):
            process.kill()
    for run in runs:
        run.communicate()


def test_a_run_listens_on_loopback_and_ends_with_its_launcher(config, init, tmp_path, begin):
    public = [name for name, addresses in psutil.net_if_addrs().items() if not _is_loopback(addresses)]
    environment = {"PYTHONPATH": str(DOUBLE), **({"GLOO_SOCKET_IFNAME": public[0]} if public else {})}

    # Check from the first process to a step after a checkpoint.
    command = ("train", "--processes", "2", config, f"model.path={init}", f"run.dir={tmp_path}", *OPTIONS)
    run = begin(*command, **environment)
    addresses = {address for _ in lines_until(run, "train 2/5000") for address in listening(run)}
    assert addresses
    assert all(ipaddress.ip_address(address).is_loopback for address in addresses)

    # SIGKILL for the launcher ends ranks, engine and scoring processes, which releases the lock.
    family = processes(run)
    assert len(family) >= 6
    pidfds = [os.pidfd_open(process.pid) for process in family]
    run.kill()
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], 180.0)[0]  # readable at the end of the process
        os.close(pidfd)
    with open(tmp_path / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_interrupted_supervised_training_exports_no_model(config, init, tmp_path, begin):
    """`brorl sft` has no checkpoints, and examples/brorl_tiny.sh starts it again if there is no model."""
    run = begin("sft", "--processes", "1", config, f"model.path={init}", f"run.dir={tmp_path}", "sft.steps=100000")
    wait_for(run, "sft 1/100000")
    run.send_signal(signal.SIGTERM)
    output = run.communicate(timeout=120)[0]
    assert run.returncode == 128 + signal.SIGTERM, output
    assert "brorl: SIGTERM came, and not every rank has saved: rank" in output.splitlines()[-1]
    assert not (tmp_path / "model").exists()


def test_the_launcher_reports_an_unknown_key_once(config):
    run = start("train", "--processes", "2", config, "rollout.nn=3")
    output = run.communicate(timeout=60)[0]
    assert run.returncode == 2
    assert output.startswith("brorl: ")
    assert "unknown key rollout.nn" in output
    assert output.count("\n") == 1


def test_a_loss_that_fails_on_the_last_stage_is_reported_by_its_rank(config, init, tmp_path):
    """The other stage does not call the loss. The trial call before the run has six tokens."""
    file = tmp_path / "mine.py"
    file.write_text("def loss(log_probs, **_):\n    return -log_probs if len(log_probs) == 6 else log_probs[1:]\n")
    options = ("--processes", 2, "parallel.pipeline=2", "algo.dynamic_sampling=false", f"algo.policy_loss={file}:loss")
    result = brorl("train", config, f"model.path={init}", f"run.dir={tmp_path / 'run'}", *options)
    assert result.returncode in (1, 2)
    (line,) = [line for line in result.stderr.splitlines() if "mine.py" in line]
    assert line.startswith(f"brorl: algo.policy_loss = {file}:loss: returned torch.float32 [")
    assert "Traceback" not in result.stderr


def test_a_second_run_in_the_same_directory(config, init, tmp_path):
    (tmp_path / "run").mkdir()
    with open(tmp_path / "run" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = f"run.dir={tmp_path / 'run'}"
        result = brorl("train", "--processes", "2", config, f"model.path={init}", run)
        assert (result.returncode, result.stderr.count("\n")) == (2, 1)
        assert "another run is writing there" in result.stderr


def _is_loopback(interface: list[Any]) -> bool:
    addresses = [a.address for a in interface if a.family == socket.AF_INET]
    return not addresses or any(ipaddress.ip_address(a).is_loopback for a in addresses)
