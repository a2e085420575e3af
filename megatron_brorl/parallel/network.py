"""Where ranks meet, and on which interface they listen: one alone, of this machine where all of them are on it.

What listens takes every byte for a rank's: torch's store and gloo's and NCCL's connections ask nobody for a password.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
from datetime import timedelta

import psutil
import torch.distributed as dist

from megatron_brorl.errors import UserError
from megatron_brorl.signals import LISTENER

_LOOPBACK = "127.0.0.1"
_AGAIN = "start the same command again to continue"


def store(world: int, timeout: timedelta) -> dist.Store:
    """The store through which the ranks of the environment find each other, `world` of them; a collective.

    Sets GLOO_SOCKET_IFNAME, and NCCL_SOCKET_IFNAME where all ranks are on this machine. Raises UserError where the
    environment does not say where rank 0 is, or names an address by which other machines do not reach it.
    """
    if "RANK" not in os.environ:  # started without a launcher
        _stay_here()
        return dist.HashStore()
    rank, host, port = (os.environ.get(name, "") for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    if not host or not port:
        raise UserError("RANK is set, MASTER_ADDR or MASTER_PORT is not: start by torchrun, Slurm or with --processes")
    own = _own_address(host, world)

    # torchrun has opened a store of its own.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        return dist.TCPStore(host, int(port), world, is_master=False, timeout=timeout)

    # Left to itself, torch would listen on all interfaces.
    if int(rank) == 0:
        listener = _listener(own, int(port))
        return dist.TCPStore(own, int(port), world, is_master=True, timeout=timeout, master_listen_fd=listener)
    server = _LOOPBACK if own == _LOOPBACK else host
    return dist.TCPStore(server, int(port), world, is_master=False, timeout=timeout)


def shared_store() -> dist.Store:
    """The store of the ranks that have joined."""
    return dist.distributed_c10d._get_default_store()


def lost_peer(error: BaseException) -> str:
    """Return one line about the rank that a failed collective waited for, or "" for any other error."""
    text = str(error)
    if missing := re.search(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier", text):
        which = f"rank{'s' if ',' in missing[1] else ''} {missing[1]}"
        return f"waited for {which}: gone, or took too long (its stacks are above); {_AGAIN}"
    of_torch = any(word in text for word in ("gloo", "NCCL", "TCPStore", "ProcessGroup", "monitoredBarrier"))
    if not of_torch and "Dist" not in type(error).__name__:
        return ""
    if "Timed out" in text or "timed out" in text or "Timeout" in text:
        return f"another rank did not come within parallel.timeout_s (rank 0 names it, unless it is rank 0); {_AGAIN}"
    if any(word in text for word in ("closed by peer", "reset by peer", "Broken pipe", "Connection refused")):
        return f"another rank is gone, and says why or was killed; {_AGAIN}"
    return ""


def _own_address(host: str, world: int) -> str:
    """The address on which this process listens, from now on by gloo too; host: of rank 0."""
    # Launchers say how many ranks are here; by hand, only a rank 0 that can be nowhere else tells.
    here = os.environ.get("LOCAL_WORLD_SIZE")
    if int(here) == world if here else host == "localhost" or _is_loopback(host):
        _stay_here()
        return _LOOPBACK

    # NCCL may know faster interfaces than the one towards rank 0: it chooses itself.
    own, name = _towards(host), os.environ.get("GLOO_SOCKET_IFNAME", "")
    if _is_loopback(own) and name:
        own = _address(name)
    if _is_loopback(own):
        raise UserError(
            f"MASTER_ADDR = {host} is {own} on this machine, where no other machine reaches it: set GLOO_SOCKET_IFNAME "
            f"to the interface of the network between the machines, or LOCAL_WORLD_SIZE = {world} where there is one"
        )
    os.environ["GLOO_SOCKET_IFNAME"] = name or _interface(own)
    return own


def _stay_here() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = _interface(_LOOPBACK)


def _towards(host: str) -> str:
    """This machine's address on the way to host, which is host's own where it is this machine."""
    try:
        family, _, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as s:
            s.connect(where)  # sends nothing
            return str(s.getsockname()[0])
    except OSError as e:
        raise UserError(f"MASTER_ADDR = {host}: {e.strerror}; give the address of rank 0's machine") from None


def _is_loopback(address: str) -> bool:
    """Of an address; a name is none."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    return False


def _interface(address: str) -> str:
    """The name of the interface that has the address."""
    for name, found in psutil.net_if_addrs().items():
        if any(a.address == address for a in found):
            return name
    raise UserError(f"no interface of this machine has {address}: set GLOO_SOCKET_IFNAME to the one to be used")


def _address(interface: str) -> str:
    """The address of an interface, its IPv4 one where it has both."""
    found = psutil.net_if_addrs().get(interface, [])
    for family in (socket.AF_INET, socket.AF_INET6):
        for a in found:
            if a.family == family:
                return a.address
    raise UserError(f"GLOO_SOCKET_IFNAME = {interface}: this machine has no such interface with an address")


def _listener(address: str, port: int) -> int:
    """The file descriptor of a socket that listens there: the launcher's where it has opened one."""
    if LISTENER in os.environ:
        return int(os.environ.pop(LISTENER))
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=2048).detach()
    except OSError as e:
        raise UserError(f"MASTER_PORT = {port}: rank 0 cannot listen on {address}: {e.strerror}") from None
