"""The store through which ranks find each other, the one network interface on which they listen, and stalled ranks.

Torch's store and the connections of gloo and NCCL have no authentication. If all ranks are on one machine, they
therefore listen on the loopback interface only.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import psutil
import torch.distributed as dist

from megatron_brorl.errors import UserError, print_error
from megatron_brorl.signals import LISTENER
from megatron_brorl.tracking.timeline import place

_LOOPBACK = "127.0.0.1"
_HINT = "start the same command again to continue"


def store(world: int, timeout: timedelta) -> dist.Store:
    """Return the store of the `world` ranks that the environment describes, without keys of earlier calls. Collective.

    Sets GLOO_SOCKET_IFNAME, and NCCL_SOCKET_IFNAME if all ranks are on this machine. Raises UserError if the
    environment does not name the address of rank 0, or if other machines cannot reach that address.
    """
    if "RANK" not in os.environ:  # started without a launcher
        _use_loopback()
        return dist.HashStore()
    rank, host, port = (os.environ.get(name, "") for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    if not host or not port:
        raise UserError("RANK is set, MASTER_ADDR or MASTER_PORT is not: start by torchrun, Slurm or with --processes")
    own_address = _own_address(host, world)
    # Keep the connection, because groups of an earlier call may keep the port in use.
    key = os.getpid(), own_address, host, port
    if key not in _stores:
        _stores[key] = _tcp_store(own_address, host, int(port), int(rank), world, timeout)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # Without a new prefix, process groups would read the keys of earlier groups as the addresses of their peers.
    prefixed_store = dist.PrefixStore(f"attempt {attempt}, call {next(_calls)}", _stores[key])
    prefixed_store.set_timeout(timeout)
    return prefixed_store


_calls = itertools.count()
_stores: dict[tuple[int, str, str, str], dist.TCPStore] = {}


def _tcp_store(own: str, host: str, port: int, rank: int, world: int, timeout: timedelta) -> dist.TCPStore:
    # If torchrun has opened a store, connect to it. It outlives the processes that torchrun restarts.
    has_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    # Pass a socket to torch, which would listen on all interfaces otherwise.
    if rank == 0 and not has_agent_store:
        return dist.TCPStore(own, port, world, is_master=True, timeout=timeout, master_listen_fd=_listener(own, port))
    server = _LOOPBACK if own == _LOOPBACK and not has_agent_store else host
    return dist.TCPStore(server, port, world, is_master=False, timeout=timeout)


def shared_store() -> dist.Store:
    """Return the store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def lost_peer(error: BaseException) -> str:
    """Return one line about the rank that a failed collective waited for, or "" for any other error."""
    text = str(error)
    if missing := re.search(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier", text):
        ranks = f"rank{'s' if ',' in missing[1] else ''} {missing[1]}"
        return f"waited for {ranks}: dead or too slow (stacks are above); {_HINT}"
    is_from_torch = any(word in text for word in ("gloo", "NCCL", "TCPStore", "ProcessGroup", "monitoredBarrier"))
    if not is_from_torch and "Dist" not in type(error).__name__:
        return ""
    if "Timed out" in text or "timed out" in text or "Timeout" in text:
        return f"another rank did not respond in parallel.timeout_s (rank 0 names it, unless it is rank 0); {_HINT}"
    if any(word in text for word in ("closed by peer", "reset by peer", "Broken pipe", "Connection refused")):
        return f"another rank has died (its own message says why, unless it was killed); {_HINT}"
    return ""


def _own_address(host: str, world: int) -> str:
    """Return the address on which this process listens, and set its interface for gloo. host: rank 0's machine."""
    # Without a launcher, LOCAL_WORLD_SIZE is missing, and only the address of rank 0 shows whether all ranks are here.
    local_world = os.environ.get("LOCAL_WORLD_SIZE")
    all_here = int(local_world) == world if local_world else host == "localhost" or _is_loopback(host)
    if all_here:
        _use_loopback()
        return _LOOPBACK

    # NCCL chooses its own interfaces, because some may be faster than the interface towards rank 0.
    own = _local_address_towards(host)
    name = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if _is_loopback(own) and name:
        own = _address(name)
    if _is_loopback(own):
        raise UserError(
            f"MASTER_ADDR = {host} is {own} on this machine, where no other machine reaches it: set GLOO_SOCKET_IFNAME "
            f"to the interface of the network between the machines, or LOCAL_WORLD_SIZE = {world} where there is one"
        )
    os.environ["GLOO_SOCKET_IFNAME"] = name or _interface(own)
    return own


def _use_loopback() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = _interface(_LOOPBACK)


def _local_address_towards(host: str) -> str:
    """Return the address of the interface from which this machine reaches host."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]  # any port will do
        with socket.socket(family, socket.SOCK_DGRAM) as s:
            s.connect(address)  # sends nothing
            return str(s.getsockname()[0])
    except OSError as e:
        raise UserError(f"MASTER_ADDR = {host}: {e.strerror}; give the address of rank 0's machine") from None


def _is_loopback(address: str) -> bool:
    """Return whether an address is a loopback address; host names are not."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    return False


def _interface(address: str) -> str:
    """Return the name of the interface with this address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address == address for a in addresses):
            return name
    raise UserError(f"no interface of this machine has {address}: set GLOO_SOCKET_IFNAME to the right one")


def _address(interface: str) -> str:
    """Return the address of an interface, IPv4 if it has both."""
    addresses = {a.family: a.address for a in reversed(psutil.net_if_addrs().get(interface, []))}
    if address := addresses.get(socket.AF_INET) or addresses.get(socket.AF_INET6):
        return address
    raise UserError(f"GLOO_SOCKET_IFNAME = {interface}: this machine has no such interface with an address")


def _listener(address: str, port: int) -> int:
    """Return the file descriptor of a listening socket: the one of the launcher if there is one, or a new one."""
    if LISTENER in os.environ:
        return int(os.environ.pop(LISTENER))
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=2048).detach()
    except OSError as e:
        raise UserError(f"MASTER_PORT = {port}: rank 0 cannot listen on {address}: {e.strerror}") from None


class StallReporter(threading.Thread):
    """Writes this rank's place to the store if no span begins or ends, and reports the late ranks on rank 0.

    It names the ranks that a stalled run waits for before its collectives time out, because NCCL then ends the process
    without naming a rank. A rank writes after 0.8 x timeout_s without progress. Rank 0 waits another 0.1 x timeout_s.
    """

    def __init__(
        self, timeout_s: float, report: Callable[[str], None] = lambda line: print_error(f"brorl: {line}")
    ) -> None:
        """timeout_s: of the collectives. All ranks must create it at the same point of the program."""
        super().__init__(name="stalls", daemon=True)
        self.timeout_s = timeout_s
        self._report = report
        self._initial_changes = place().changes  # Earlier code of this process may not have run on the other ranks.
        # The main thread may wait for a key, and then holds the lock of its connection.
        self._store = shared_store().clone()  # type: ignore[attr-defined]
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        written = -1
        while size > 1 and not self._stopped.wait(self.timeout_s / 20):
            now = place()
            if now.changes == written or time.monotonic() < now.due + 0.8 * self.timeout_s:
                continue
            written = now.changes
            try:
                self._store.set(_key(rank), f"{now.changes - self._initial_changes} {now.name}")
                if rank == 0 and not self._stopped.wait(self.timeout_s / 10) and place() == now:
                    self._report(_late_ranks(self._store, size))
            except RuntimeError as e:
                self._report(f"rank {rank} waits in {now.name!r}, and rank 0 does not answer: {e}")
                return


def _key(rank: int) -> str:
    return f"stalls/{rank}"


def _late_ranks(store: dist.Store, size: int) -> str:
    """Return a line with the ranks that have written no place, or an earlier place than other ranks."""
    places = {rank: store.get(_key(rank)).decode().split(" ", 1) for rank in range(size) if store.check([_key(rank)])}
    furthest, phase = max((int(changes), name) for changes, name in places.values())
    late: dict[str, list[str]] = {}
    for rank in range(size):
        changes, name = places.get(rank, ("-1", "no report: dead, or still working"))
        if int(changes) < furthest:
            late.setdefault(name, []).append(str(rank))
    summary = "; ".join(f"rank {', '.join(ranks)} ({name})" for name, ranks in late.items())
    return f"no progress in {phase!r}; behind are: {summary or 'none'}"
