"""The engine process. It runs in the engine's environment and answers trainer ranks over a local socket.

python -m megatron_brorl.rollout.remote.server ADDRESS OPTIONS (JSON of EngineOptions)

It ends when its standard input is closed, which happens whenever the rank that started it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import json
import os
import pkgutil
import shutil
import sys
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import torch
import zmq
import zmq.asyncio

from megatron_brorl.rollout.engine import Sampling
from megatron_brorl.rollout.registry import ENGINES
from megatron_brorl.rollout.remote.process import kill_group
from megatron_brorl.rollout.remote.protocol import (
    Capabilities,
    EngineBackend,
    EngineOptions,
    Message,
    ProtocolError,
    decode,
    encode,
)

HEARTBEAT_S = 0.5  # seconds between heartbeats


class Server:
    """Serves one engine to the ranks that share it. Only the leader changes weights, while no rank generates."""

    def __init__(self, backend: EngineBackend, capabilities: Capabilities, address: str) -> None:
        self.backend = backend
        self.capabilities = capabilities
        self.version = -1  # version of the weights; -1 while they are random, freed or incomplete
        self.caches_asleep = False  # after sleep(), until all ranks have freed the memory that the caches need
        self.waking = asyncio.Lock()
        self.pid = os.getpid()
        self.clients: set[bytes] = set()
        self.calls: dict[tuple[bytes, int], dict[int, Any]] = {}  # handles of rollouts in flight by number, for abort
        self.tasks: set[asyncio.Task[None]] = set()
        self.socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        # By default a ROUTER socket drops messages if 1,000 are waiting for a busy rank.
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.bind(address)

    async def serve(self) -> None:
        """Answer messages until the task is cancelled."""
        self._spawn(self._heartbeat())
        while True:
            # Answer a rank of another version with an error and keep serving the other ranks.
            client, *frames = await self.socket.recv_multipart()
            try:
                message = decode(frames)
            except ProtocolError as e:
                await self._send(client, Message("error", {"what": str(e)}))
                continue

            # Generation runs in a task. Changes of weights and memory finish before the next message is read.
            if message.kind == "hello":
                self.clients.add(client)  # for heartbeats
                await self._send(client, Message("hello", dataclasses.asdict(self.capabilities)))
                await self._send(client, self._state())
            elif message.kind == "generate":  # answered with "rollout" messages, then "ended"
                self._spawn(self._generate(client, message))
            elif message.kind == "cancel":
                self._spawn(self._cancel(client, message))
            else:
                await self._change(client, message)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _state(self) -> Message:
        return Message("heartbeat", {"pid": self.pid, "version": self.version})

    async def _heartbeat(self) -> None:
        while True:
            for client in list(self.clients):
                await self._send(client, self._state())
            await asyncio.sleep(HEARTBEAT_S)

    async def _send(self, client: bytes, message: Message) -> None:
        await self.socket.send_multipart([client, *encode(message)])

    async def _change(self, client: bytes, message: Message) -> None:
        """Change the engine's state and answer. After a failure the weights may be mixed, so their version is -1."""
        backend, fields = self.backend, message.fields
        try:
            if message.kind == "load":
                await backend.load(dict(fields["bucket"]))
            elif message.kind == "wake":
                await backend.wake()  # Weights follow in later messages.
            elif message.kind == "finish":
                await backend.finish()
                self.version = fields["version"]
            else:
                self.version = -1
                await {"begin": backend.begin, "sleep": backend.sleep}[message.kind]()
                self.caches_asleep |= message.kind == "sleep"
        except Exception as e:
            self.version = -1
            reply = Message("error", {"what": f"{message.kind}: {type(e).__name__}: {e}"})
        else:
            reply = Message("done", {"kind": message.kind})
        await self._send(client, self._state())
        await self._send(client, reply)

    async def _cancel(self, client: bytes, message: Message) -> None:
        async with self.waking:  # By now, earlier calls have submitted their rollouts.
            handles = self.calls.get((client, message.fields["call"]), {})
            for number in handles.keys() & message.fields["numbers"]:
                self.backend.abort(handles[number])

    async def _generate(self, client: bytes, message: Message) -> None:
        """Answer with a "rollout" per finished rollout, then "ended"; or with "stale" if the weights are different."""
        fields = message.fields
        call = fields["call"]
        if fields["version"] != self.version:  # The rank asks again when it knows the new version.
            await self._send(client, Message("stale", {"call": call}))
            return

        try:
            # All ranks have freed the memory of the caches before the first generation after a sleep.
            async with self.waking:
                if self.caches_asleep:
                    await self.backend.wake_caches()
                    self.caches_asleep = False
            sampling = Sampling(**fields["sampling"])
            rows = self._submit(message, sampling)
            self.calls[client, call] = {number: handle for number, handle, _ in rows}
            await asyncio.gather(*(self._answer(client, call, *row) for row in rows))
        except Exception as e:
            # The rank raises an error, so the other rollouts are not needed.
            for handle in self.calls.get((client, call), {}).values():
                self.backend.abort(handle)
            await self._send(client, Message("error", {"what": f"generate: {type(e).__name__}: {e}", "call": call}))
        finally:
            self.calls.pop((client, call), None)

        await self._send(client, Message("ended", {"call": call}))

    def _submit(self, message: Message, sampling: Sampling) -> list[tuple[int, Any, Sampling]]:
        """Submit every rollout as a separate request. Return their numbers, handles and sampling parameters."""
        stops = dict(message.fields["stops"])
        tensors = message.tensors
        rows = []
        prompts = tensors["ids"].split(tensors["lengths"].tolist())
        columns = (tensors[name].tolist() for name in ("numbers", "tokens", "seeds"))
        for ids, number, tokens, seed in zip(prompts, *columns, strict=True):
            row_sampling = dataclasses.replace(sampling, stop_strings=(*sampling.stop_strings, *stops.get(number, ())))
            params = self.backend.params(row_sampling, tokens, seed)
            rows.append((number, self.backend.submit(ids.tolist(), params), row_sampling))
        return rows

    async def _answer(self, client: bytes, call: int, number: int, handle: Any, sampling: Sampling) -> None:
        """Wait for one rollout and send it to the rank."""
        completion = await self.backend.completion(handle)
        ids = completion.token_ids
        log_probs = completion.log_probs
        if sampling.temperature == 0:
            log_probs = [0.0] * len(ids)  # greedy sampling has probability 1

        by_token = completion.finish == "stop" and not sampling.stop_strings
        if by_token and (not ids or ids[-1] not in self.backend.options.stop_ids):
            raise ValueError(f"a rollout finished by a stop token, but ends with {ids[-3:]}")
        tensors = {"ids": torch.tensor(ids, dtype=torch.int64), "log_probs": torch.tensor(log_probs)}
        fields: dict[str, Any] = {"call": call, "number": number, "finish": completion.finish}
        if sampling.routes and completion.routes is not None:
            fields["routes"] = list(completion.routes.shape)
            tensors["routes"] = completion.routes.flatten()
        await self._send(client, Message("rollout", fields, tensors))


async def _main(address: str, options: EngineOptions) -> None:
    # Check the version first, because importing the backend fails with an older engine. The trainer shows the last line
    # of the log.
    kind = ENGINES[options.engine]
    if too_old := kind.too_old(importlib.import_module(kind.package).__version__):
        raise SystemExit(too_old)
    backend: EngineBackend = pkgutil.resolve_name(kind.backend)(options)
    await Server(backend, await backend.start(), address).serve()


def _end_with_parent(directory: Path) -> None:
    """Wait until standard input is closed, then remove the folder, kill the process group and end."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    shutil.rmtree(directory, ignore_errors=True)
    if os.getpgrp() == os.getpid():
        kill_group(os.getpid())  # the processes that the engine has started
    os._exit(0)


if __name__ == "__main__":
    socket_address = sys.argv[1]
    folder = Path(socket_address.removeprefix("ipc://")).parent
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    options = json.loads(sys.argv[2])
    options |= {key: tuple(options[key]) for key in ("stop_ids", "stop_strings")}
    asyncio.run(_main(socket_address, EngineOptions(**options)))
