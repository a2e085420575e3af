"""Test of the server's socket."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import torch
import zmq

from megatron_brorl.rollout.remote.protocol import Capabilities, Message, decode, encode
from megatron_brorl.rollout.remote.server import Server

CAPABILITIES = Capabilities("none", 1000, 10)
ANSWERS = 5000


def test_busy_rank_loses_no_answers(tmp_path):
    """By default a ROUTER socket drops messages beyond 1,000 per peer."""
    address = f"ipc://{tmp_path}/socket"

    async def answer_all() -> None:
        server = Server(SimpleNamespace(), CAPABILITIES, address)
        # A rank with a short receive queue, which does not read yet.
        rank = zmq.Context.instance().socket(zmq.DEALER)
        rank.setsockopt(zmq.RCVHWM, 1)
        rank.setsockopt(zmq.RCVBUF, 4096)
        rank.connect(address)
        rank.send_multipart(encode(Message("hello")))
        client, *_ = await server.socket.recv_multipart()

        ids = torch.arange(64)
        for number in range(ANSWERS):
            await server._send(client, Message("rollout", {"call": 1, "number": number}, {"ids": ids}))

        found = []
        while rank.poll(2000):
            found.append(decode(rank.recv_multipart()).fields["number"])
        assert found == list(range(ANSWERS))
        rank.close(0)
        server.socket.close(0)

    asyncio.run(answer_all())
