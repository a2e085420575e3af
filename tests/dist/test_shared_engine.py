"""Ranks that share an engine: its workers use the GPUs of all ranks, and only its leader calls it.

Each job returns the events of all ranks in their order. The fakes wait for an event of another rank, never for a time:
a rank that has reached the barrier is known to wait.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from dist.jobs import grid_of
from torch.distributed.distributed_c10d import _get_default_store

from megatron_brorl.config.schema import Config, EngineConfig, ModelConfig, RolloutConfig
from megatron_brorl.rollout.remote import remote_engine
from megatron_brorl.rollout.remote.remote_engine import RemoteEngine, connect_engine
from megatron_brorl.rollout.watchdog import Watchdog
from megatron_brorl.train import weight_sync

pytestmark = pytest.mark.slow


class Events:
    """Log of the events on all ranks."""

    def __init__(self, name: str) -> None:
        grid_of()  # the processes meet
        self.store = dist.PrefixStore(name, _get_default_store())

    def happened(self, event: str) -> None:
        """Append an event and release the ranks that wait for it."""
        self.store.set(str(self.store.add("count", 1)), event)
        self.store.set(f"first of {event.split()[0]}", "")

    def wait(self, word: str) -> None:
        """Wait for an event whose text begins with this word."""
        self.store.wait([f"first of {word}"])

    def all(self) -> list[str]:
        """Return all events in order. Collective."""
        dist.barrier()
        return [self.store.get(str(i + 1)).decode() for i in range(self.store.add("count", 0))]


def _joined(folder: str, tensor: int) -> tuple[bool, Callable[[], Any]]:
    """Return whether connect_engine makes this rank lead its engine, and the barrier of the ranks that share it."""
    config = replace(
        Config(),
        rollout=RolloutConfig(engine="trtllm"),
        model=ModelConfig(path=folder),
        engine=EngineConfig(tensor=tensor, shared_memory=folder),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", str(dist.get_rank()))
        patch.setenv("LOCAL_WORLD_SIZE", str(dist.get_world_size()))
        patch.setattr(remote_engine, "RemoteEngine", lambda *_, **keywords: keywords)
        keywords: Any = connect_engine(config, names={}, context=200, vocab=304, stop_ids=(2,))
    dist.barrier()
    shutil.rmtree(keywords["folder"], ignore_errors=True)
    return keywords["devices"] is not None, keywords["wait_for_ranks"]


def _engine(events: Events, folder: str, before_sleep: Callable[[], None]) -> RemoteEngine:
    """Return this rank's client of an engine for both ranks, whose process is a fake that logs its calls."""
    leads, meet = _joined(folder, tensor=2)
    own_name = "leader" if leads else "other"

    def announce_and_meet() -> None:
        events.store.set(f"first of {own_name}", "")  # this rank has reached the barrier
        meet()

    def sleep() -> None:
        before_sleep()
        events.happened("engine asleep")

    engine: Any = RemoteEngine.__new__(RemoteEngine)
    engine.wait_for_ranks = announce_and_meet
    engine.supervisor = None
    if leads:
        engine.supervisor = SimpleNamespace(sleep=sleep, wake=lambda: events.happened("engine awake"))
    return engine


def sleeping(rank: int, folder: str, name: str) -> list[str]:
    """The leader's engine is slow to sleep: its call returns once the other rank continues or waits."""
    events = Events(name)
    engine = _engine(events, folder, before_sleep=lambda: events.wait("other"))
    Watchdog(engine, timeout_s=60.0).sleep()
    if rank == 1:
        events.happened("other loads its models")
    return events.all()


def test_no_rank_loads_its_models_before_the_engine_is_asleep(worlds, tmp_path):
    expected = ["engine asleep", "other loads its models"]
    assert worlds(2).run("test_shared_engine:sleeping", str(tmp_path), "sleep") == [expected] * 2


def waking(rank: int, folder: str, name: str) -> list[str]:
    """The other rank is slow to offload its models: it is done once the leader has woken its engine or waits."""
    events = Events(name)
    engine = _engine(events, folder, before_sleep=lambda: None)
    if rank == 1:
        events.wait("leader")
        events.happened("other has offloaded")
    Watchdog(engine, timeout_s=60.0).wake()
    if rank == 0:
        events.happened("leader goes on")
    return events.all()


def test_the_engine_takes_no_memory_before_every_rank_has_offloaded(worlds, tmp_path):
    expected = ["other has offloaded", "engine awake", "leader goes on"]
    assert worlds(2).run("test_shared_engine:waking", str(tmp_path), "wake") == [expected] * 2


def updating(rank: int, name: str) -> list[str]:
    """The leader's engine is slow to load weights: its call returns once the other rank continues or waits."""
    events = Events(name)
    problem = weight_sync._problem

    def reported_problem(checksum: int, refused: bool) -> str:
        if rank == 1:
            events.store.set("first of other", "")
        return problem(checksum, refused)

    def update_weights(tensors: Any, version: int) -> None:
        if rank == 0:
            events.wait("other")
            events.happened("engine has loaded")

    worker: Any = SimpleNamespace(hf_tensors=lambda: iter(()), grid=SimpleNamespace(rank=rank, world=2))
    engine: Any = SimpleNamespace(update_weights=update_weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_sync, "_problem", reported_problem)
        weight_sync.sync_weights(worker, engine, version=1)
    if rank == 1:
        events.happened("other goes on")
    return events.all()


def test_no_rank_continues_before_the_engine_has_its_weights(worlds):
    assert worlds(2).run("test_shared_engine:updating", "update") == [["engine has loaded", "other goes on"]] * 2


def stuck(rank: int, folder: str, name: str, stuck_rank: int) -> list[str]:
    """One rank is stuck in generate: no rank waits forever, and a stuck leader does not call its engine."""
    events = Events(name)
    watchdog = Watchdog(_engine(events, folder, before_sleep=lambda: None), timeout_s=60.0)
    watchdog.stuck = rank == stuck_rank
    watchdog.sleep()
    watchdog.wake()
    return events.all()


@pytest.mark.parametrize(("stuck_rank", "expected"), [(0, []), (1, ["engine asleep", "engine awake"])])
def test_a_stuck_rank_blocks_no_other_rank(stuck_rank, expected, worlds, tmp_path):
    assert worlds(2).run("test_shared_engine:stuck", str(tmp_path), f"stuck {stuck_rank}", stuck_rank) == [expected] * 2


def groups(rank: int, folder: str, name: str) -> list[str]:
    """Two engines have two ranks each; the ranks of the second meet after those of the first have continued."""
    events = Events(name)
    _, meet = _joined(folder, tensor=2)
    if rank >= 2:
        events.wait("first")
    meet()
    if rank in (0, 2):
        events.happened("first engine's ranks met" if rank == 0 else "second engine's ranks met")
    return events.all()


def test_each_engine_has_a_barrier_of_its_own(worlds, tmp_path):
    expected = ["first engine's ranks met", "second engine's ranks met"]
    assert worlds(4).run("test_shared_engine:groups", str(tmp_path), "groups") == [expected] * 4
