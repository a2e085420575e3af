"""Tests of the ports of Ray."""

from __future__ import annotations

import socket

from megatron_brorl.rollout.remote.trtllm import ray_node

BASE = 61_000 - ray_node.PORTS * 20  # above the kernel's default ephemeral ports


def ports(first: int) -> list[int]:
    """Return every port in the arguments of a Ray that uses this block."""
    options = dict(a.removeprefix("--").split("=") for a in ray_node.arguments(first, 1) if "=" in a)
    services = [int(value) for name, value in options.items() if name.endswith("port") and "worker" not in name]
    return [*services, *range(int(options["min-worker-port"]), int(options["max-worker-port"]) + 1)]


def test_engines_have_separate_ports():
    """The second engine skips a block in which another program listens."""
    first, first_reservation = ray_node.find_block(BASE)
    with first_reservation, socket.create_server(("127.0.0.1", first + ray_node.PORTS + 3)):
        second, second_reservation = ray_node.find_block(BASE)
        with second_reservation:
            assert second >= first + 2 * ray_node.PORTS
            for block in (first, second):
                block_ports = ports(block)
                assert len(set(block_ports)) == len(block_ports)
                assert set(block_ports) <= set(range(block, block + ray_node.PORTS - 1))
    third, third_reservation = ray_node.find_block(BASE)
    third_reservation.close()
    assert third == first  # The first block was released.
