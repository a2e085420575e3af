"""Tests of RemoteEngine and Server with a minimal backend."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import torch
import zmq
from unit.rollout.test_turns import Pool, Reply, observation, text_of, tokens_of

from megatron_brorl.config.schema import EngineConfig, EnvironmentConfig, RolloutConfig
from megatron_brorl.rollout import remote
from megatron_brorl.rollout.engine import Request, Sampling
from megatron_brorl.rollout.registry import ENGINES
from megatron_brorl.rollout.remote.pending import sibling_seed
from megatron_brorl.rollout.remote.process import Connection, address
from megatron_brorl.rollout.remote.protocol import (
    Capabilities,
    Completion,
    EngineBackend,
    EngineOptions,
    Message,
    decode,
    encode,
)
from megatron_brorl.rollout.remote.remote_engine import RemoteEngine
from megatron_brorl.rollout.remote.server import Server
from megatron_brorl.rollout.turns import TurnEngine
from megatron_brorl.types import Prompt, ScoreResult

FOLDER = Path(remote.__path__[0])
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=8, stop_ids=(2,))
OPTIONS = EngineOptions("other", "", vocab=50, context=40, dtype="float32", max_rows=8, stop_ids=(2,), section={})


class Backend(EngineBackend):
    """Answers with three tokens: 10 + the last digit of the seed, the last prompt token, and the stop token."""

    keeps_cut = False  # whether cancelled rollouts return their tokens
    slow = False  # rollouts end only when they are cancelled

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.events: list[Any] = []
        self.aborted = asyncio.Event()

    async def start(self) -> Capabilities:
        return Capabilities("Other 1.0", kv_tokens=4000, rows=8)

    def params(self, sampling, tokens, seed):
        return seed, tokens

    def submit(self, ids, params):
        return list(ids), params

    async def completion(self, handle):
        ids, (seed, _) = handle
        tokens = [10 + seed % 10, ids[-1], 2]
        if self.slow:
            await self.aborted.wait()
            kept = tokens[:2] if self.keeps_cut else []
            return Completion(kept, "cut", [-float(t) for t in kept])
        return Completion(tokens, "stop", [-float(t) for t in tokens])

    def abort(self, handle):
        self.events.append("abort")
        self.aborted.set()

    async def begin(self):
        self.events.append("begin")

    async def load(self, bucket):
        self.events.append(bucket)

    async def finish(self):
        self.events.append("finish")

    async def sleep(self):
        self.events.append("sleep")

    async def wake(self):
        self.events.append("wake")

    async def wake_caches(self):
        self.events.append("wake caches")


@contextlib.contextmanager
def served(backend: EngineBackend, folder: Path):
    """Run the server of a backend in a thread."""
    ready = threading.Event()
    running: list[Any] = []

    async def serve():
        server = Server(backend, await backend.start(), address(folder))
        running.extend((asyncio.get_running_loop(), asyncio.current_task()))
        ready.set()
        with contextlib.suppress(asyncio.CancelledError):
            await server.serve()
        server.socket.close(0)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(30)
    yield
    loop, task = running
    loop.call_soon_threadsafe(task.cancel)
    thread.join(30)
    assert not thread.is_alive()


@pytest.fixture
def backend(tmp_path, request):
    """Yield a backend with its server. With a parameter it is slow; the parameter is its keeps_cut."""
    backend = Backend(OPTIONS)
    backend.slow = hasattr(request, "param")
    backend.keeps_cut = getattr(request, "param", False)
    with served(backend, tmp_path):
        yield backend


def ask(link: Connection, message: Message) -> None:
    link.send(message)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if any(answer.kind == "done" for answer in link.poll(0.05)):
            return
    raise AssertionError(message.kind)


@pytest.fixture
def leader(backend, tmp_path):
    """Return the connection of the rank that sends weights."""
    with contextlib.closing(Connection(address(tmp_path))) as connection:
        yield connection


@pytest.fixture
def engine(leader, tmp_path):
    """Return an engine of the backend with weights of version 3."""
    with contextlib.closing(RemoteEngine(EngineConfig(), OPTIONS, {}, tmp_path, None, tmp_path / "log")) as engine:
        ask(leader, Message("finish", {"version": 3}))
        engine.update_weights([], 3)
        yield engine


def test_the_caches_wake_at_the_first_generation(backend, engine, leader):
    """They do not wake before, because the trainer uses the memory during weight sync."""
    assert engine.duplicate_advice == 'Other 1.0; start a new run with rollout.engine = "torch"'
    for kind in ("sleep", "wake", "begin"):
        ask(leader, Message(kind))
    ask(leader, Message("load", {"bucket": {"path": "x", "records": []}}))
    ask(leader, Message("finish", {"version": 3}))
    for _ in range(2):
        engine.generate([Request(Prompt("p", "", (5, 6), None, "exact"), key=7, n=3, first=4)], SAMPLING)
    updates = ["begin", {"path": "x", "records": []}, "finish"]
    assert backend.events == ["finish", "sleep", "wake", *updates, "wake caches"]


@pytest.mark.parametrize("backend", [True, False], indirect=True, ids=["kept", "dropped"])
def test_cancelled_rollouts_keep_the_tokens_that_the_backend_returns(backend, engine):
    class Impatient:
        def finished(self, request, rollout):
            raise AssertionError("no rollout has finished")

        def cancelled(self):
            return bool(engine._open_calls)  # as soon as the requests are sent

    request = Request(Prompt("p", "", (5, 6), None, "exact"), key=7, n=2)
    (group,) = engine.generate([request], SAMPLING, Impatient())
    assert [r.finish for r in group] == ["cut", "cut"]
    expected = [[10 + sibling_seed(7, i, 0) % 10, 6] for i in (0, 1)] if backend.keeps_cut else [[], []]
    assert [r.token_ids.tolist() for r in group] == expected
    assert [r.log_probs.tolist() for r in group] == [[-float(t) for t in ids] for ids in expected]


@pytest.mark.parametrize("backend", [True], indirect=True)
def test_a_withdrawn_request_is_aborted(backend, engine):
    """The backend aborts the two rollouts of this request. Then all rollouts end."""
    withdrawn = threading.Event()
    withdrawn.set()
    prompt = Prompt("p", "", (5, 6), None, "exact")
    requests = [Request(prompt, key=7, n=3), Request(prompt, key=8, n=2, withdrawn=withdrawn)]
    engine.generate(requests, SAMPLING)
    assert backend.events.count("abort") == 2


def test_supply_is_requested_as_there_is_room(engine):
    """The engine computes eight rollouts together, but its cache holds only four of 40 tokens that are half done."""
    assert engine.rows == 8
    engine._link.capabilities = engine.capabilities = dataclasses.replace(engine.capabilities, kv_tokens=80)
    assert engine.rows == 4
    prompt = Prompt("p", "", (5, 6), None, "exact")
    left = [Request(prompt, key=7, n=2, first=first) for first in range(6, 20, 2)]
    ended = []
    callbacks = SimpleNamespace(finished=lambda *rollout: ended.append(rollout), cancelled=lambda: False)

    class Queue:
        rows, prompt_tokens = 14, 2

        def next_requests(self, room):
            in_flight = 20 - sum(request.n for request in left) - len(ended)
            assert room == 4 - in_flight > 0
            return [left.pop(0)] if left else []

        def has_more(self):
            return bool(left)

    groups = engine.generate([Request(prompt, key=7, n=6)], SAMPLING, callbacks, Queue())
    assert [r.index for group in groups for r in group] == list(range(20))
    assert {r.finish for group in groups for r in group} == {"stop"}
    (whole,) = engine.generate([Request(prompt, key=7, n=20)], SAMPLING)
    assert [r.token_ids.tolist() for group in groups for r in group] == [r.token_ids.tolist() for r in whole]


def test_turns_are_requests_with_the_whole_prefix(engine):
    """The seed of a turn is keyed by the number of tokens before it. Replies come when the engine has no rows."""
    end = Reply((), done=True, score=ScoreResult(0.5, "ok"))
    pool = Pool(delay=1, answer=lambda text, last: end if last else observation("20 21"))
    pool.cancelled = lambda: None if engine._open_calls else pool.deliver()
    turns = TurnEngine(engine, pool, EnvironmentConfig(factory="e:E", max_turns=3), text_of, tokens_of)
    request = Request(Prompt("p", "", (5, 6), None, "environment"), key=7, n=2)
    (group,) = turns.generate([request], dataclasses.replace(SAMPLING, max_tokens=30), pool)
    for i, rollout in enumerate(group):
        first, second, third = (10 + sibling_seed(7, i, done) % 10 for done in (1, 6, 11))
        assert rollout.token_ids.tolist() == [31, first, 31, 2, 20, 21, second, 21, 2, 20, 21, third, 21, 2]
        assert rollout.episode.sampled.tolist() == [False] + [True] * 3 + ([False] * 2 + [True] * 3) * 2
        assert (rollout.episode.turns, rollout.episode.score.reward) == (3, 0.5)


def test_every_engine_has_a_backend():
    assert {"torch", *ENGINES} == set(get_args(get_type_hints(RolloutConfig)["engine"]))
    for engine, kind in ENGINES.items():
        module, _, name = kind.backend.partition(":")
        assert module == f"{remote.__name__}.{engine}.llm"
        assert f"class {name}(EngineBackend)" in (FOLDER / engine / "llm.py").read_text()


def test_busy_rank_loses_no_answers(tmp_path):
    """By default a ROUTER socket drops messages beyond 1,000 per peer."""
    count = 5000

    async def answer_all() -> None:
        server = Server(Backend(OPTIONS), Capabilities("none", kv_tokens=1000, rows=10), address(tmp_path))
        # A rank with a short receive queue, which does not read yet.
        rank = zmq.Context.instance().socket(zmq.DEALER)
        rank.setsockopt(zmq.RCVHWM, 1)
        rank.setsockopt(zmq.RCVBUF, 4096)
        rank.connect(address(tmp_path))
        rank.send_multipart(encode(Message("hello")))
        client, *_ = await server.socket.recv_multipart()

        ids = torch.arange(64)
        for number in range(count):
            await server._send(client, Message("rollout", {"call": 1, "number": number}, {"ids": ids}))

        numbers = []
        while rank.poll(2000):
            numbers.append(decode(rank.recv_multipart()).fields["number"])
        assert numbers == list(range(count))
        rank.close(0)
        server.socket.close(0)

    asyncio.run(answer_all())
