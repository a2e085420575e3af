"""The address on which rank 0 listens, and the interface for gloo. LOCAL_WORLD_SIZE=0 simulates other machines."""

from __future__ import annotations

import itertools
import os
import socket
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from megatron_brorl.errors import UserError
from megatron_brorl.parallel import network

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "BRORL_LISTENER",
         "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCHELASTIC_USE_AGENT_STORE",
         "TORCHELASTIC_RESTART_COUNT")  # fmt: skip


def external_interface() -> tuple[str, str]:
    """Return an interface with an address other than loopback, and the address."""
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                return name, entry.address
    pytest.skip("this machine has no interface beside loopback")


def listening_addresses() -> set[str]:
    connections = psutil.Process().net_connections("inet")
    return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}


@pytest.fixture
def environment(monkeypatch):
    """Return a function that sets the given variables and removes the others, in a process without a store."""
    monkeypatch.setattr(network, "_stores", {})

    def set_(**values: str) -> None:
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    set_()  # After this, monkeypatch also restores variables that the test and network.store set.
    return set_


def free_port(address: str = "127.0.0.1") -> str:
    with socket.socket() as listener:
        listener.bind((address, 0))
        return str(listener.getsockname()[1])


@pytest.mark.parametrize("launcher", ["by hand", "rank.sh", "none"])
def test_ranks_on_one_machine_use_loopback(environment, launcher):
    """The host name and the user's variables for other jobs make no difference."""
    name, address = external_interface()
    before = listening_addresses()
    common = {"RANK": "0", "MASTER_PORT": free_port(), "GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    environment(
        **{
            "by hand": {**common, "MASTER_ADDR": "localhost"},
            "rank.sh": {**common, "MASTER_ADDR": address, "LOCAL_WORLD_SIZE": "1"},
            "none": {"GLOO_SOCKET_IFNAME": name},
        }[launcher]
    )
    store = network.store(world=1, timeout=timedelta(seconds=20))
    store.set("key", "value")
    assert store.get("key") == b"value"
    loopback = os.environ["GLOO_SOCKET_IFNAME"]
    assert os.environ["NCCL_SOCKET_IFNAME"] == loopback
    assert "127.0.0.1" in {a.address for a in psutil.net_if_addrs()[loopback]}
    assert listening_addresses() - before <= {"127.0.0.1"}
    assert isinstance(store, dist.HashStore) == (launcher == "none")


@pytest.mark.parametrize("gloo", ["", "given"])
def test_rank_0_listens_on_its_address_if_there_are_several_machines(environment, gloo):
    name, address = external_interface()
    environment(RANK="0", MASTER_ADDR=address, MASTER_PORT=free_port(address), LOCAL_WORLD_SIZE="0")
    if gloo:
        os.environ["GLOO_SOCKET_IFNAME"] = gloo
    before = listening_addresses()
    store = network.store(world=1, timeout=timedelta(seconds=20))
    store.set("key", "value")
    assert listening_addresses() - before == {address}
    assert os.environ["GLOO_SOCKET_IFNAME"] == (gloo or name)
    assert "NCCL_SOCKET_IFNAME" not in os.environ


def test_a_name_that_is_loopback_here_needs_an_interface(environment):
    """On Debian, /etc/hosts maps a machine's own name to 127.0.1.1."""
    name, address = external_interface()
    variables = {"RANK": "0", "MASTER_ADDR": "127.0.1.1", "MASTER_PORT": free_port(address), "LOCAL_WORLD_SIZE": "0"}
    environment(**variables)
    with pytest.raises(UserError, match=r"MASTER_ADDR = 127\.0\.1\.1 is 127\.0\.\d\.1 on this machine.*GLOO_SOCKET"):
        network.store(world=1, timeout=timedelta(seconds=20))
    environment(**variables, GLOO_SOCKET_IFNAME=name)
    before = listening_addresses()
    store = network.store(world=1, timeout=timedelta(seconds=20))
    store.set("key", "value")
    assert listening_addresses() - before == {address}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"MASTER_PORT": ""}, "RANK is set, MASTER_ADDR or MASTER_PORT is not"),
        ({"MASTER_ADDR": "no.such.host.invalid"}, "MASTER_ADDR = no.such.host.invalid: .*; give the address of rank 0"),
        ({"GLOO_SOCKET_IFNAME": "nope0", "MASTER_ADDR": "127.0.1.1"}, "GLOO_SOCKET_IFNAME = nope0: "),
    ],
)
def test_mistakes_in_the_environment_end_in_one_line(environment, changes, message):
    good = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "LOCAL_WORLD_SIZE": "0"}
    environment(**{**good, **changes})
    with pytest.raises(UserError, match=message):
        network.store(world=1, timeout=timedelta(seconds=20))


def test_a_port_in_use_ends_in_one_line(environment):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environment(RANK="0", MASTER_ADDR="localhost", MASTER_PORT=str(port))
        with pytest.raises(UserError, match=f"MASTER_PORT = {port}: rank 0 cannot listen on 127.0.0.1: "):
            network.store(world=1, timeout=timedelta(seconds=20))


def test_each_call_has_keys_of_its_own(environment):
    """All calls share torchrun's store, with any timeout, and also in a process that its agent has restarted."""
    port = free_port()
    agent = dist.TCPStore("127.0.0.1", int(port), is_master=True, wait_for_workers=False)
    common = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for seconds, attempt in ((20, "0"), (30, "0"), (20, "1"), (20, "2")):
        environment(**common, LOCAL_WORLD_SIZE="1", TORCHELASTIC_RESTART_COUNT=attempt)
        if attempt != "0":  # A restarted process counts its calls from 0 again.
            network._calls = itertools.count()
        store = network.store(world=1, timeout=timedelta(seconds=seconds))
        assert store.timeout == timedelta(seconds=seconds)
        assert not store.check(["key"])
        store.set("key", "value")
    assert agent.num_keys() >= 4
