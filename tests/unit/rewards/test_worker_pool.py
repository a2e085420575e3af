"""Tests of the pool with verifiers that hang, crash, raise and forge results."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psutil
import pytest

from megatron_brorl.errors import UserError
from megatron_brorl.rewards import worker_process
from megatron_brorl.rewards.custom import IN_PROCESS
from megatron_brorl.rewards.verifier import VerifierRow
from megatron_brorl.rewards.worker_pool import RewardPool, ScoreRequest
from megatron_brorl.types import Prompt, ScoreResult

MAKE = "hostile:make"
OK = ScoreResult(1.0, "ok")


def prompt(verifier: str, name: str = "p", **metadata: object) -> Prompt:
    return Prompt(name, "text", token_ids=(1,), answer="reference", verifier=verifier, metadata=metadata)


def ask(verifier: str, *answers: str | None, **metadata: object) -> list[ScoreRequest]:
    shared = prompt(verifier, **metadata)
    return [ScoreRequest(shared, answer) for answer in answers]


def pids(pool: RewardPool) -> list[int]:
    with pool._condition:
        return [process.pid for process in pool._processes]


@pytest.fixture(scope="module")
def pool():
    with RewardPool(workers=2, timeout_s=1.0, judge_factory=MAKE) as pool:
        yield pool


def test_scores_are_in_the_order_of_requests_of_each_thread(pool):
    with ThreadPoolExecutor(8) as threads:
        values = [[(i * 37 % 1001) / 1000 for i in range(250 * n)] for n in range(8)]
        scores = list(threads.map(lambda answers: pool.score(ask("echo", *map(str, answers))), values))
    assert scores == [[ScoreResult(value, "ok") for value in values_of_thread] for values_of_thread in values]
    nothing = ScoreRequest(prompt("echo"), None, "no answer in the response")
    scores = pool.score([nothing, *ask("echo", "1"), nothing])
    assert [score.status for score in scores] == ["no_answer", "ok", "no_answer"]
    assert [score.reason for score in scores] == [nothing.no_answer_reason, "", nothing.no_answer_reason]


@pytest.mark.parametrize("verifier", ["hang", "hang_in_c", "stop"])
def test_a_hanging_verifier_loses_only_its_own_answer(pool, verifier):
    scores = pool.score(ask(verifier, "a", "hang", "b", *map(str, range(50))))
    assert scores == [OK, ScoreResult(0.0, "timeout"), *[OK] * 51]
    assert scores[1].reason == "no score in 1 s"


def test_the_deadline_is_per_answer_not_per_message(pool):
    pool.reset()
    scores = pool.score(ask("nap", *map(str, range(12))))  # 1.8 s per worker; the deadline is 1 s.
    assert scores == [OK] * 12
    assert pool.stats.latency_max_s > 1


def test_an_answer_that_crashes_twice_scores_0(pool, tmp_path):
    log = tmp_path / "log"
    scores = pool.score(ask("die", *map(str, range(20)), "die", *map(str, range(20, 40)), log=str(log)))
    assert scores == [*[OK] * 20, ScoreResult(0.0, "crash"), *[OK] * 20]
    assert log.read_text() == "died\ndied\n"
    pool.reset()
    assert pool.score(ask("die_once", "a", log=str(tmp_path / "once"))) == [OK]
    assert pool.stats.restarts == 1


def test_exceptions_do_not_end_the_worker(pool):
    pool.score(ask("echo", "1", "0"))
    before = pids(pool)
    answers = ask("raises", "value", "exit", "recurse", "memory")
    scores = pool.score([*answers, *(replace(r, prompt=replace(r.prompt, answer="fine")) for r in answers)])
    assert scores == [ScoreResult(0.0, "broken")] * 4 + [ScoreResult(0.0, "error")] * 4
    assert [s.reason.partition(" (")[0] for s in scores[4:6]] == ["ValueError: with ?[31m newlines", "SystemExit: 0"]
    assert scores[6].reason.startswith("RecursionError: maximum recursion depth exceeded")
    assert set(before) <= set(pids(pool))  # The other worker may have started only now.


@pytest.mark.parametrize("text", ["noise", "endless", "nested", "infinite", "status", "part", "short"])
def test_a_malformed_result_counts_as_a_crash(pool, text):
    scores = pool.score(ask("writes", "a", text, "b"))
    assert scores == [ScoreResult(0.25, "ok"), ScoreResult(0.0, "crash"), ScoreResult(0.25, "ok")]


def test_forged_results_end_only_their_worker():
    with RewardPool(workers=1, timeout_s=20.0, judge_factory=MAKE) as pool:
        for _ in range(4):
            pool.score(ask("writes", "forged"))
            pool.reset()
            assert pool.score(ask("echo", "0.25", "0.75")) == [ScoreResult(0.25, "ok"), ScoreResult(0.75, "ok")]


def test_equal_answers_are_scored_once_until_reset(pool, tmp_path):
    log = tmp_path / "log"
    shared = prompt("log", log=str(log))
    pool.reset()
    assert pool.score([ScoreRequest(shared, a) for a in ["a", "b", "c", "a", None, "b"]])[:4] == [OK] * 4
    assert sorted(log.read_text().split()) == ["a", "b", "c"]
    assert (pool.stats.answers, pool.stats.hits) == (5, 2)
    pool.reset()
    assert (pool.stats.answers, pool.stats.hits) == (0, 0)
    assert pool.score([ScoreRequest(shared, "a")]) == [OK]
    # The verifier also sees the text and the metadata of the prompt.
    pool.score([ScoreRequest(replace(shared, text="other"), "a"), ScoreRequest(replace(shared, metadata={}), "a")])
    assert log.read_text().split().count("a") == 3


def test_verifiers_may_print_and_workers_import_neither_torch_nor_numpy(pool, capfd):
    assert pool.score([*ask("prints", "a", "b"), *ask("light", "a")]) == [OK] * 3
    assert capfd.readouterr() == ("", "")


def test_all_workers_use_the_same_hash_seed(monkeypatch):
    code = "print(hash('a text') % 1000 / 1000)"
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    expected = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    with RewardPool(workers=1, timeout_s=5.0, judge_factory=MAKE) as pool:
        assert pool.score(ask("hash_seed", "a"))[0].reward == float(expected)


def test_scores_do_not_depend_on_the_number_of_workers(tmp_path):
    requests = ask("echo", *[f"0.{i}" for i in range(200)], "word", None)
    requests += [*ask("echo", "nan", "1"), *ask("hang", "hang", "a")]
    requests += [*ask("die", "die", "b", log=str(tmp_path / "log")), *ask("echo", *map(str, range(150)))]
    results = []
    for workers in (1, 2, 3):
        with RewardPool(workers, timeout_s=1.0, judge_factory=MAKE) as pool:
            results.append(pool.score(requests))
    assert results[0] == results[1] == results[2]
    statuses = ["broken", "no_answer", "invalid", "ok", "timeout", "ok", "crash", "ok"]
    assert [score.status for score in results[0][200:208]] == statuses


def test_workers_ignore_job_signals(pool):
    pool.score(ask("echo", *map(str, range(100))))
    before = pids(pool)
    for pid in before:
        assert os.getpgid(pid) != os.getpgid(0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(pid, number)
    assert pool.score(ask("echo", "0.25")) == [ScoreResult(0.25, "ok")]
    assert set(before) <= set(pids(pool))  # The other worker may have started only now.


def test_an_interrupted_call_leaves_no_worker():
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        with RewardPool(workers=2, timeout_s=30.0, judge_factory=MAKE) as pool:
            before = pids(pool)
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            with pytest.raises(KeyboardInterrupt):
                pool.score(ask("hang", "a", "hang", "b"))
            assert not any(psutil.pid_exists(pid) for pid in before)
            assert pool.score(ask("echo", "0.5")) == [ScoreResult(0.5, "ok")]
    finally:
        signal.signal(signal.SIGALRM, previous)


def test_close_ends_the_workers_and_fails_missing_scores():
    pool = RewardPool(workers=1, timeout_s=60.0, judge_factory=MAKE)
    pool.score(ask("echo", "1"))
    (pid,) = pids(pool)
    scores = [pool.submit(request) for request in ask("hang", "hang", "b", "c")]
    pool.close()
    for score in scores:
        with pytest.raises(RuntimeError, match="closed before this answer was scored"):
            score.result()
    assert not psutil.pid_exists(pid)
    for late in ("a", None):
        with pytest.raises(RuntimeError, match="pool is closed"):
            pool.submit(ask("echo", late)[0])
    pool.cancel()
    pool.close()


def test_workers_outlive_the_thread_that_made_the_pool():
    """On Linux a worker dies with the thread that started it."""
    with ThreadPoolExecutor(1) as thread:
        new_pool = thread.submit(RewardPool, workers=1, timeout_s=20.0, judge_factory=MAKE).result()
    with new_pool as pool:
        assert pool.score(ask("echo", "0.5")) == [ScoreResult(0.5, "ok")]
        assert pool.stats.restarts == 0


def test_killed_workers_are_replaced_and_a_closed_pool_leaves_no_thread_or_file():
    with RewardPool(workers=1, timeout_s=20.0, judge_factory=MAKE) as pool:
        pool.score(ask("echo", "1"))
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with RewardPool(workers=2, timeout_s=20.0, judge_factory=MAKE) as pool:
            pool.score(ask("echo", "1", "0"))
            before = pids(pool)
            for pid in before:
                os.kill(pid, signal.SIGKILL)
            assert pool.score(ask("echo", "0.5", "0.25")) == [ScoreResult(0.5, "ok"), ScoreResult(0.25, "ok")]
            assert set(before) != set(pids(pool))
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, files)


def test_a_worker_that_cannot_start_is_a_user_error(monkeypatch):
    message = r"^reward worker cannot start: ModuleNotFoundError.*no_such_module"
    with RewardPool(workers=1, timeout_s=5.0, judge_factory="no_such_module:f") as pool:
        scores = [pool.submit(request) for request in ask("echo", "1", "0")]
        for score in scores:
            with pytest.raises(UserError, match=message):
                score.result()
        with pytest.raises(UserError, match=message):
            pool.submit(ask("echo", "1")[0]).result()

    def start(*args: object, **options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(worker_process.subprocess, "Popen", start)
    with RewardPool(2, 5.0, MAKE) as pool, pytest.raises(UserError, match="temporarily unavailable; is the machine"):
        pool.score(ask("echo", "1"))


def test_an_in_process_function_scores_only_its_own_rows():
    def score_locally(answer: str, row: VerifierRow) -> float:
        scored.append((answer, row["id"]))
        return 1 / len(answer)

    scored: list[tuple[str, str]] = []
    with RewardPool(workers=1, timeout_s=20.0, judge_factory=MAKE, function=score_locally) as pool:
        scores = pool.score([*ask(IN_PROCESS, "ab", "", "ab", None), *ask("echo", "0.25")])
        pool.cancel()
        assert pool.score(ask(IN_PROCESS, "abcd")) == [ScoreResult(0.25, "ok")]
    assert [score.status for score in scores] == ["ok", "error", "ok", "no_answer", "ok"]
    assert [score.reward for score in scores] == [0.5, 0.0, 0.5, 0.0, 0.25]
    assert [answer for answer, _ in scored if answer != "reference"] == ["ab", "", "ab", "abcd"]
    assert {name for _, name in scored} == {"p"}
