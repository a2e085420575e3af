"""Tests of the settings of TensorRT-LLM and of the ports of its Ray."""

from __future__ import annotations

import socket

import pytest

from megatron_brorl.rollout.registry import graph_sizes
from megatron_brorl.rollout.remote.trtllm import ray_node
from megatron_brorl.rollout.remote.trtllm.settings import restore_modes, rows_at_a_time, sleep_tags

BASE = 61_000 - ray_node.PORTS * 20  # above the kernel's default ephemeral ports


def test_graph_sizes_pad_by_at_most_a_quarter():
    for rows in (1, 2, 3, 4, 5, 8, 31, 250, 257, 1024):
        sizes = graph_sizes(rows)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == rows
        for batch in range(33, rows + 1):
            assert min(s for s in sizes if s >= batch) <= 1.25 * batch
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20]


def test_sleep_frees_all_memory_and_keeps_everything_except_weights():
    known = ["sampler", "_no_capture_init_model", "model_extra", "kv_cache", "model", "model_weights"]
    tags = sleep_tags(known)
    assert tags == ["sampler", "model_extra", "kv_cache", "model", "model_weights"]
    kept = {tag for tag, mode in restore_modes(tags).items() if mode == "CPU"}
    assert kept == {"sampler", "model_extra", "model"}


def test_rows_at_a_time():
    """98 GiB at 28 KiB per token hold 256 responses of 14,336 tokens."""
    tokens = (98 << 30) // (28 << 10)
    assert rows_at_a_time(tokens, 14_336, 1024) == 256
    assert rows_at_a_time(tokens, 14_336, 100) == 100
    with pytest.raises(ValueError, match="keys and values of 100 tokens fit"):
        rows_at_a_time(100, 101, 8)


def ports(first: int) -> list[int]:
    """Return every port in the arguments of a Ray that uses this block."""
    given = dict(a.removeprefix("--").split("=") for a in ray_node.arguments(first, 1) if "=" in a)
    services = [int(value) for name, value in given.items() if name.endswith("port") and "worker" not in name]
    return [*services, *range(int(given["min-worker-port"]), int(given["max-worker-port"]) + 1)]


def test_engines_have_separate_ports():
    """The second engine skips a block in which another program listens."""
    first, held = ray_node.find_block(BASE)
    with held, socket.create_server(("127.0.0.1", first + ray_node.PORTS + 3)):
        second, also = ray_node.find_block(BASE)
        with also:
            assert second >= first + 2 * ray_node.PORTS
            for block in (first, second):
                own = ports(block)
                assert len(set(own)) == len(own)
                assert set(own) <= set(range(block, block + ray_node.PORTS - 1))
    again, held = ray_node.find_block(BASE)  # a released block is free again
    held.close()
    assert again == first
