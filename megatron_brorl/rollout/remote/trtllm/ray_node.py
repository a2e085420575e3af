"""The Ray of one engine, on ports that no other engine of the node uses.

Several Rays that choose their own ports on one node race for them, because each looks for free ones and binds them
later. Here each has a block of its own. A block belongs to the process that holds its last port; the system frees that
port when the process ends.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import socket
import subprocess
import sys
import time

FIRST_PORT = 20000  # below 32768, from where Linux gives ports to any program that asks for one
PORTS = 100  # of a block
BLOCKS = 100  # that are tried
_HOST = "127.0.0.1"
_START_S = 120.0
# Ray's options, in the order of their ports in the block; the workers have what is left of it.
_SERVICES = (
    "--port",  # of the store that everything else finds one another by
    "--node-manager-port",
    "--object-manager-port",
    "--metrics-export-port",
    "--runtime-env-agent-port",
    "--dashboard-agent-grpc-port",
    "--dashboard-agent-listen-port",
)
_CLIENT = "--ray-client-server-port"  # refused where Ray has no client, and 10001 for all where it has one


def start(gpus: int) -> socket.socket:
    """Start a Ray in this process's session and name it in RAY_ADDRESS, where TensorRT-LLM looks for one.

    gpus: devices, those of CUDA_VISIBLE_DEVICES. Raises OSError where a
    port is taken or Ray ends, TimeoutError where it does not come up.
    """
    first, held = find_block()
    process = subprocess.Popen([sys.executable, "-m", "ray.scripts.scripts", "start", *arguments(first, gpus)])

    # TensorRT-LLM looks once.
    deadline = time.monotonic() + _START_S
    while not _answers(first):
        if process.poll() is not None:
            raise OSError(f"ray start ended with exit code {process.returncode}; its own words stand above")
        if time.monotonic() > deadline:
            raise TimeoutError(f"Ray did not listen on port {first} within {_START_S:g} s")
        time.sleep(0.1)
    os.environ["RAY_ADDRESS"] = f"{_HOST}:{first}"
    return held


def find_block(base: int = FIRST_PORT) -> tuple[int, socket.socket]:
    """The first port of the first block from `base` on whose services can listen, and what holds the block.

    Raises OSError where there is none.
    """
    for first in range(base, min(base + PORTS * BLOCKS, 65536 - PORTS), PORTS):
        held = _bound(first + PORTS - 1)
        if held is None:
            continue
        # Its services' ports, and that of a client where there is one; workers look for theirs by themselves.
        services = [_bound(first + i) for i in range(len(_SERVICES) + 1)]
        for s in services:
            if s is not None:
                s.close()
        if None not in services:
            return first, held
        held.close()
    raise OSError(errno.EADDRINUSE, f"no block of {PORTS} free ports from {base} on: end the processes that hold them")


def arguments(first: int, gpus: int) -> list[str]:
    """Of `ray start` for a Ray that uses the ports first .. first + PORTS - 2."""
    names = (*_SERVICES, *([_CLIENT] if importlib.util.find_spec("grpc") else []))
    return [
        "--head",
        "--block",  # it ends with the process that is started here
        f"--node-ip-address={_HOST}",
        *(f"{name}={first + i}" for i, name in enumerate(names)),
        f"--min-worker-port={first + len(_SERVICES) + 1}",
        f"--max-worker-port={first + PORTS - 2}",
        f"--num-gpus={gpus}",
        f"--num-cpus={2 * gpus + 2}",  # one each for a worker; more would only start more idle processes
        "--include-dashboard=false",
        "--disable-usage-stats",
    ]


def _bound(port: int) -> socket.socket | None:
    """A socket that has the port; None where another has it."""
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
