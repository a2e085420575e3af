"""A run of two ranks with all that belongs to it: what listens, and what is left when its launcher dies."""

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
from e2e.runs import brorl, lines_until, rows, start, wait_for

DOUBLE = Path(__file__).parents[1] / "contract" / "double"
OPTIONS = [
    *("rollout.engine=trtllm", "engine.tensor=2", "engine.cuda_graphs=false", "reward.strict=false", "rollout.n=4"),
    *("train.steps=5000", "train.checkpoint_every=1", "evaluate.every=0", "data.held_out=[]"),
]


def processes(launcher: Any) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        found = psutil.Process(launcher.pid)
        return [found, *found.children(recursive=True)]
    return []


def listening(launcher: Any) -> Iterator[str]:
    """Addresses that any process of the run takes anybody's connections or datagrams on."""
    for process in processes(launcher):
        with contextlib.suppress(psutil.Error):
            for c in process.net_connections("inet"):
                # A datagram socket with a peer hears that alone: a question to a name server.
                if c.status == psutil.CONN_LISTEN or (c.type == socket.SOCK_DGRAM and c.laddr and not c.raddr):
                    yield c.laddr.ip


@pytest.fixture
def begin(tmp_path) -> Iterator[Callable[..., Any]]:
    """start, with an end to what a failed test leaves."""
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


def test_a_run_listens_on_loopback_dies_as_one_and_goes_on(config, init, tmp_path, begin):
    other = [name for name, found in psutil.net_if_addrs().items() if not _is_loopback(found)]
    environment = {"PYTHONPATH": str(DOUBLE), **({"GLOO_SOCKET_IFNAME": other[0]} if other else {})}
    command = ("train", "--processes", "2", config, f"model.path={init}", f"run.dir={tmp_path}", *OPTIONS)

    # From the first process to a step after a checkpoint.
    run = begin(*command, **environment)
    found = {address for _ in lines_until(run, "train 2/5000") for address in listening(run)}
    assert found
    assert all(ipaddress.ip_address(address).is_loopback for address in found)

    # SIGKILL for the launcher ends ranks, engine and scoring processes, which releases the lock.
    family = processes(run)
    assert len(family) >= 6
    ends = [os.pidfd_open(process.pid) for process in family]
    run.kill()
    for end in ends:
        assert select.select([end], [], [], 180.0)[0]
        os.close(end)
    with open(tmp_path / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    # What was saved is gone on with.
    saved = int((tmp_path / "checkpoints" / "latest").read_text().strip().removeprefix("step_"))
    done = brorl(*command, f"train.steps={saved + 1}", **environment)
    assert done.returncode == 0, done.stderr
    assert "resumed from" in done.stderr
    assert [row["step"] for row in rows(tmp_path)] == list(range(saved + 1))


def test_a_warm_start_that_is_stopped_leaves_no_half_trained_model(config, init, tmp_path, begin):
    """It has nothing to go on from: a signal ends it, and examples/brorl_tiny.sh begins it anew."""
    run = begin("sft", "--processes", "1", config, f"model.path={init}", f"run.dir={tmp_path}", "sft.steps=100000")
    wait_for(run, "sft 1/100000")
    run.send_signal(signal.SIGTERM)
    said = run.communicate(timeout=120)[0]
    assert run.returncode == 128 + signal.SIGTERM, said
    assert "brorl: SIGTERM came, and not every rank has saved: rank" in said.splitlines()[-1]
    assert not (tmp_path / "model").exists()


def _is_loopback(found: list[Any]) -> bool:
    addresses = [a.address for a in found if a.family == socket.AF_INET]
    return not addresses or any(ipaddress.ip_address(a).is_loopback for a in addresses)
