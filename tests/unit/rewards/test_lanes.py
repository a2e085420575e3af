"""Workers that are frozen, killed or speak out of turn: beside a healthy one they never end a run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from megatron_brorl.errors import UserError
from megatron_brorl.rewards import lanes
from megatron_brorl.rewards.lanes import Job, Lanes
from megatron_brorl.rewards.pool import RewardPool, ScoreRequest
from megatron_brorl.rewards.process import WorkerProcess
from megatron_brorl.rewards.protocol import Item
from megatron_brorl.rewards.verifier import VerifierRow
from megatron_brorl.types import Prompt, Verdict

RESOLVE = "hostile:resolve"
OK = Verdict(1.0, "ok")


def ask(verifier: str, *answers: str) -> list[ScoreRequest]:
    shared = Prompt("p", "text", (1,), "reference", verifier)
    return [ScoreRequest(shared, answer) for answer in answers]


def judge(pool: Lanes, *answers: str) -> list[Verdict]:
    """What verifier echo, which returns the answer as its reward, says."""
    row = VerifierRow(id="p", prompt="text", answer="reference", metadata={})
    jobs = [Job(Item("echo", row, answer)) for answer in answers]
    for job in jobs:
        pool.put(job)
    return [job.verdict.result() for job in jobs]


class Starts:
    """Workers by number; those in `frozen` are stopped as soon as they exist."""

    def __init__(self, frozen: set[int] | range) -> None:
        self.frozen, self.pids = frozen, list[int]()

    def __call__(self) -> WorkerProcess:
        worker = WorkerProcess(RESOLVE, 4096)
        if len(self.pids) in self.frozen:
            os.kill(worker.pid, signal.SIGSTOP)
        self.pids.append(worker.pid)
        return worker


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 1 << 20], ids=["small", "more than a pipe holds"])
def test_a_worker_that_froze_while_idle_is_replaced(size: int, tmp_path: Path) -> None:
    file = tmp_path / "go"
    row = VerifierRow(id="p", prompt="text", answer="reference", metadata={"file": str(file)})

    def put(answers: list[str]) -> list[Job]:
        jobs = [Job(Item("wait_for", row, answer)) for answer in answers]
        for job in jobs:
            pool.put(job)
        return jobs

    pool = Lanes(2, 3.0, Starts(set()))
    try:
        # Both are at work at once, so that both know the verifier and are heard of within the deadline of an answer.
        first = put(["a", "b"])
        while pool.stats.begun < 2:
            time.sleep(0.01)
        file.touch()
        assert [job.verdict.result() for job in first] == [OK] * 2

        frozen = pool.pids[0]
        os.kill(frozen, signal.SIGSTOP)
        assert [job.verdict.result() for job in put([str(i) + " " * size for i in range(6)])] == [OK] * 6
        assert frozen not in pool.pids
        assert gone(frozen)
        assert pool.stats.restarts == 1
    finally:
        pool.close()


def test_a_worker_that_freezes_at_an_answer_costs_that_answer() -> None:
    with RewardPool(2, 2.0, resolve=RESOLVE) as pool:
        verdicts = pool.score(ask("stop", "a", "stop", *map(str, range(40))))
        assert verdicts == [OK, Verdict(0.0, "timeout"), *[OK] * 40]
        assert pool.stats().restarts == 1


def test_workers_that_freeze_at_their_start_are_given_up_beside_a_healthy_one(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    starts = Starts(range(1, 1000))
    pool = Lanes(2, 60.0, starts)
    try:
        assert judge(pool, "0.5") == [Verdict(0.5, "ok")]  # the first worker has imported what it needs
        monkeypatch.setattr(lanes, "_START_S", 0.2)
        values = [i / 100 for i in range(100)]
        while len(pool.pids) > 1:  # a new one may find that all work is done, and be no trouble
            assert judge(pool, *map(str, values)) == [Verdict(v, "ok") for v in values]
        assert len(starts.pids) == 1 + lanes._START_ATTEMPTS
        assert pool.pids == starts.pids[:1]
        assert all(map(gone, starts.pids[1:]))
        assert pool.stats.restarts == lanes._START_ATTEMPTS
        text = "a reward worker cannot start (no answer in 0.2 s; is the machine overloaded?): going on with 1 of 2\n"
        assert capfd.readouterr().err == text

        # The next step tries again.
        pool.renew()
        starts.frozen = set()
        monkeypatch.setattr(lanes, "_START_S", 60.0)
        judge(pool, "0.25")
        assert len(pool.pids) == 2
    finally:
        pool.close()
    assert all(map(gone, starts.pids))


@pytest.mark.slow
def test_a_worker_that_froze_at_its_start_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one that works."""
    starts = Starts({1})
    pool = Lanes(2, 60.0, starts)
    try:
        judge(pool, "0.5")
        monkeypatch.setattr(lanes, "_START_S", 5.0)
        assert judge(pool, *["0.25"] * 50) == [Verdict(0.25, "ok")] * 50
        assert gone(starts.pids[1])
        assert len(pool.pids) == 2
    finally:
        pool.close()


def test_where_none_can_be_started_the_run_ends_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """After as many attempts for each; whoever comes back later starts anew."""
    monkeypatch.setattr(lanes, "_START_S", 0.2)
    starts = Starts(range(1000))
    pool = Lanes(2, 60.0, starts)
    try:
        with pytest.raises(UserError, match=r"^reward worker cannot start: no answer in 0\.2 s; is the machine"):
            judge(pool, "0.5", "0.25")
        assert len(starts.pids) == 2 * lanes._START_ATTEMPTS
        assert all(map(gone, starts.pids))
        starts.frozen = set()
        monkeypatch.setattr(lanes, "_START_S", 60.0)
        assert judge(pool, "0.5") == [Verdict(0.5, "ok")]
    finally:
        pool.close()


def test_no_process_to_be_had_is_no_end_beside_a_healthy_worker(capfd: pytest.CaptureFixture[str]) -> None:
    starts, allowed = Starts(set()), 1

    def start() -> WorkerProcess:
        if len(starts.pids) >= allowed:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return starts()

    pool = Lanes(2, 60.0, start)
    try:
        assert judge(pool, "0.5", "0.25") == [Verdict(0.5, "ok"), Verdict(0.25, "ok")]
        assert "(Resource temporarily unavailable; is the machine overloaded?): going on with 1 of 2" in (
            capfd.readouterr().err
        )
        os.kill(starts.pids[0], signal.SIGKILL)
        while not gone(starts.pids[0]):  # until the pool has noticed
            time.sleep(0.01)
        with pytest.raises(UserError, match=r"cannot start: Resource temporarily unavailable"):
            judge(pool, "0.5")
    finally:
        pool.close()


def test_verdicts_out_of_turn_end_their_worker_and_not_the_run() -> None:
    with RewardPool(1, 20.0, resolve=RESOLVE) as pool:
        for _ in range(3):
            pool.score(ask("forge", "forge"))
            pool.forget()
            assert pool.score(ask("echo", "0.25", "0.75")) == [Verdict(0.25, "ok"), Verdict(0.75, "ok")]
