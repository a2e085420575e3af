"""Starts Ray for one engine, on ports that no other engine of the node uses.

Ray instances that choose their own ports on one node race for them, because Ray looks for free ports and binds them
later. Here every instance has its own block of ports. A process reserves a block by binding its last port, which the
kernel frees when the process ends.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import socket
import subprocess
import sys
import time

FIRST_PORT = 20000  # below 32768, where Linux's range of ephemeral ports starts
PORTS = 100  # per block
BLOCKS = 100  # blocks to try
_HOST = "127.0.0.1"
_START_S = 120.0
# Ray's options in the order of their ports in the block. Workers use the remaining ports.
_SERVICES = (
    "--port",  # the global control store
    "--node-manager-port",
    "--object-manager-port",
    "--metrics-export-port",
    "--runtime-env-agent-port",
    "--dashboard-agent-grpc-port",
    "--dashboard-agent-listen-port",
)
# Ray refuses this option if it has no client (needs grpc). The default port is 10001 for every instance.
_CLIENT = "--ray-client-server-port"


def start(gpus: int) -> socket.socket:
    """Start a Ray in this process's session and name it in RAY_ADDRESS, where TensorRT-LLM looks for one.

    gpus: number of devices in CUDA_VISIBLE_DEVICES. Return the socket that reserves the ports. Raises OSError if no
    ports are free or Ray ends, and TimeoutError if it does not start.
    """
    first, reservation = find_block()
    process = subprocess.Popen([sys.executable, "-m", "ray.scripts.scripts", "start", *arguments(first, gpus)])

    # Wait until Ray listens, because TensorRT-LLM tries to connect only once.
    deadline = time.monotonic() + _START_S
    while not _answers(first):
        if process.poll() is not None:
            raise OSError(f"ray start ended with exit code {process.returncode}; its output is above")
        if time.monotonic() > deadline:
            raise TimeoutError(f"Ray did not listen on port {first} within {_START_S:g} s")
        time.sleep(0.1)
    os.environ["RAY_ADDRESS"] = f"{_HOST}:{first}"
    return reservation


def find_block(base: int = FIRST_PORT) -> tuple[int, socket.socket]:
    """Return the first port of the first free block from `base` on, and the socket that reserves the block.

    Raises OSError if no block is free.
    """
    for first in range(base, min(base + PORTS * BLOCKS, 65536 - PORTS), PORTS):
        reservation = _bound(first + PORTS - 1)
        if reservation is None:
            continue
        # Check the ports of the services and of the client. Workers search for free ports themselves.
        services = [_bound(first + i) for i in range(len(_SERVICES) + 1)]
        for s in services:
            if s is not None:
                s.close()
        if None not in services:
            return first, reservation
        reservation.close()
    raise OSError(errno.EADDRINUSE, f"no block of {PORTS} free ports from {base} on: end the processes that hold them")


def arguments(first: int, gpus: int) -> list[str]:
    """Return the arguments of `ray start` with the ports first .. first + PORTS - 2."""
    names = (*_SERVICES, *([_CLIENT] if importlib.util.find_spec("grpc") else []))
    return [
        "--head",
        "--block",  # keep running in the foreground as a child of this process
        f"--node-ip-address={_HOST}",
        *(f"{name}={first + i}" for i, name in enumerate(names)),
        f"--min-worker-port={first + len(_SERVICES) + 1}",
        f"--max-worker-port={first + PORTS - 2}",
        f"--num-gpus={gpus}",
        f"--num-cpus={2 * gpus + 2}",  # one per worker; Ray starts an idle process per CPU
        "--include-dashboard=false",
        "--disable-usage-stats",
    ]


def _bound(port: int) -> socket.socket | None:
    """Return a socket that is bound to the port, or None if the port is in use."""
    s = socket.socket()
    try:
        s.bind((_HOST, port))
    except OSError:
        s.close()
        return None
    return s


def _answers(port: int) -> bool:
    with socket.socket() as s:
        s.settimeout(1)
        return s.connect_ex((_HOST, port)) == 0
