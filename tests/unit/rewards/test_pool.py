"""The pool against verifiers that hang, crash, raise and lie."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_brorl.errors import UserError
from megatron_brorl.rewards import gym_tasks, gym_verifier
from megatron_brorl.rewards.pool import RewardPool, ScoreRequest
from megatron_brorl.rewards.verifier import VerifierRow
from megatron_brorl.types import Prompt, Verdict

RESOLVE = "hostile:resolve"
HERE = Path(__file__).parent


def prompt(verifier: str, name: str = "p", **metadata: object) -> Prompt:
    return Prompt(name, "text", (1,), "reference", verifier, metadata)


def ask(verifier: str, *answers: str | None, **metadata: object) -> list[ScoreRequest]:
    shared = prompt(verifier, **metadata)
    return [ScoreRequest(shared, answer) for answer in answers]


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(2, 1.0, resolve=RESOLVE) as pool:
        yield pool


def test_verdicts_come_in_the_order_of_requests(pool: RewardPool) -> None:
    values = [(i * 37 % 1001) / 1000 for i in range(1001)]
    verdicts = pool.score(ask("echo", *map(str, values)))
    assert verdicts == [Verdict(v, "ok") for v in values]
    assert pool.score([]) == []
    assert pool.score(ask("echo", None, "1", None)) == [
        Verdict(0.0, "no_answer"),
        Verdict(1.0, "ok"),
        Verdict(0.0, "no_answer"),
    ]


@pytest.mark.parametrize("verifier", ["hang", "hang_in_c"])
def test_a_hang_costs_only_its_own_answer(pool: RewardPool, verifier: str) -> None:
    began = time.monotonic()
    verdicts = pool.score(ask(verifier, "a", "hang", "b", *map(str, range(50))))
    assert verdicts == [Verdict(1.0, "ok"), Verdict(0.0, "timeout"), *[Verdict(1.0, "ok")] * 51]
    assert time.monotonic() - began < 10


def test_the_deadline_is_per_answer_not_per_message(pool: RewardPool) -> None:
    verdicts = pool.score(ask("nap", *map(str, range(12))))  # 6 x 0.3 s per worker, more than the deadline of 1 s
    assert verdicts == [Verdict(1.0, "ok")] * 12


def test_a_crash_is_tried_twice_and_costs_only_its_own_answer(pool: RewardPool, tmp_path: Path) -> None:
    log = tmp_path / "log"
    verdicts = pool.score(ask("die", *map(str, range(20)), "die", *map(str, range(20, 40)), log=str(log)))
    assert verdicts == [*[Verdict(1.0, "ok")] * 20, Verdict(0.0, "crash"), *[Verdict(1.0, "ok")] * 20]
    assert log.read_text() == "died\ndied\n"


def test_a_crash_that_does_not_come_back_is_forgiven(pool: RewardPool, tmp_path: Path) -> None:
    assert pool.score(ask("die_once", "a", log=str(tmp_path / "log"))) == [Verdict(1.0, "ok")]


def test_exceptions_are_counted_and_the_worker_lives(pool: RewardPool) -> None:
    pool.score(ask("echo", "1"))
    before = pool.pids
    answers = ask("raises", "value", "exit", "recurse", "memory")
    verdicts = pool.score([*answers, *(replace(r, prompt=replace(r.prompt, answer="fine")) for r in answers)])
    assert verdicts == [Verdict(0.0, "broken")] * 4 + [Verdict(0.0, "error")] * 4  # the reference raises, or does not
    assert [v.reason for v in verdicts[4:6]] == ["ValueError: with ?[31m", "SystemExit: 0"]
    assert verdicts[6].reason.startswith("RecursionError: maximum recursion depth exceeded")
    assert pool.pids == before


def test_without_a_reference_an_exception_is_the_answers(pool: RewardPool) -> None:
    request = ScoreRequest(replace(prompt("raises"), answer=None), "value")
    assert pool.score([request]) == [Verdict(0.0, "error")]


# What scorers of allowed tasks raise on; the reference of each is judged.
HARD = [("prime_factorization", "banana"), ("prime_factorization", "2 x 3"), ("game_of_life", "{}"), ("boxnet", "-1")]


@pytest.mark.slow
@pytest.mark.parametrize(("task", "answer"), HARD)
def test_what_an_allowed_scorer_raises_on_is_a_wrong_answer(task: str, answer: str) -> None:
    entry = json.loads(json.dumps(gym_tasks.create(task, 11, {}, "test")[5]))
    metadata = {"source_dataset": task, "entry": entry}
    with pytest.raises((ValueError, KeyError, TypeError)) as error:  # of the library itself
        gym_verifier.score(answer, VerifierRow(id="p", prompt="t", answer=entry["answer"], metadata=metadata))
    with RewardPool(1, 20.0) as pool:
        asked = Prompt("p", "t", (1,), entry["answer"], "reasoning_gym", metadata)
        verdicts = pool.score([ScoreRequest(asked, a) for a in (answer, entry["answer"])])
    assert verdicts == [Verdict(0.0, "error"), Verdict(1.0, "ok") if entry["answer"] else Verdict(0.0, "no_answer")]
    assert verdicts[0].reason == f"{error.type.__name__}: {error.value}"


def test_only_finite_numbers_are_rewards(pool: RewardPool) -> None:
    bad = ["nan", "inf", "none", "string", "list", "complex"]
    assert pool.score(ask("returns", *bad)) == [Verdict(0.0, "invalid")] * len(bad)
    assert pool.score(ask("returns", "true", "int", "half", "negative", "above")) == [
        Verdict(reward, "ok") for reward in (1.0, 1.0, 0.5, -0.001, 1.001)
    ]


def test_what_a_worker_did_not_mean_is_a_crash(pool: RewardPool) -> None:
    verdicts = pool.score(ask("writes_verdicts", "a", "attack", "b"))
    assert verdicts == [Verdict(0.5, "ok"), Verdict(0.0, "crash"), Verdict(0.5, "ok")]
    assert verdicts[1].reason == "its process died, twice"


def test_every_verdict_has_its_reason_and_parts(pool: RewardPool) -> None:
    scored, unanswered = pool.score(
        [*ask("explains", "wrong"), ScoreRequest(prompt("explains"), None, "no answer in the response")]
    )
    assert (scored.reward, scored.reason, scored.parts) == (0.25, "wrong for text", {"a": 0.5, "b": 0.0})
    assert (unanswered.status, unanswered.reason) == ("no_answer", "no answer in the response")


def test_equal_requests_are_scored_once(pool: RewardPool, tmp_path: Path) -> None:
    log = tmp_path / "log"
    verdicts = pool.score(ask("log", *["a", "b"] * 256, log=str(log)))
    assert verdicts == [Verdict(1.0, "ok")] * 512
    assert sorted(log.read_text().split()) == ["a", "b"]


def test_a_verdict_is_kept_until_the_pool_forgets(pool: RewardPool, tmp_path: Path) -> None:
    log = tmp_path / "log"
    shared = prompt("log", log=str(log))
    pool.forget()
    assert pool.score([ScoreRequest(shared, a) for a in "abca"]) == [Verdict(1.0, "ok")] * 4
    assert pool.score([ScoreRequest(shared, a) for a in ["a", "b", None, "d"]])[:2] == [Verdict(1.0, "ok")] * 2
    assert sorted(log.read_text().split()) == ["a", "b", "c", "d"]
    assert (pool.stats().answers, pool.stats().hits) == (7, 3)
    pool.forget()
    assert (pool.stats().answers, pool.stats().hits) == (0, 0)
    assert pool.score([ScoreRequest(shared, "a")]) == [Verdict(1.0, "ok")]
    assert sorted(log.read_text().split()) == ["a", "a", "b", "c", "d"]
    # The text of the prompt is a part of what a verifier sees.
    pool.score([ScoreRequest(replace(shared, text="other"), "a")])
    assert log.read_text().split().count("a") == 3


def test_an_impure_verifier_gets_every_response(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with RewardPool(1, 20.0, resolve=RESOLVE, impure=frozenset({"log"})) as pool:
        assert pool.score(ask("log", *"aabaa", log=str(log))) == [Verdict(1.0, "ok")] * 5
        assert pool.score(ask("echo", *["0.5"] * 3)) == [Verdict(0.5, "ok")] * 3
        assert log.read_text().split() == list("aabaa")
        assert (pool.stats().answers, pool.stats().hits) == (8, 2)


def test_requests_wait_for_their_turn(tmp_path: Path) -> None:
    """One worker: the second waits at least as long as the first takes."""
    with RewardPool(1, 20.0, resolve=RESOLVE) as pool:
        pool.score(ask("nap", "warm"))
        pool.forget()
        pool.score(ask("nap", "a", "b", None))
        stats = pool.stats()
    assert stats.queue_max_s >= 0.3
    assert stats.queue_max_s / 2 <= stats.queue_mean_s < stats.queue_max_s


def test_requests_of_many_threads_at_once(pool: RewardPool) -> None:
    found: dict[int, list[Verdict]] = {}

    def work(number: int) -> None:
        found[number] = pool.score(ask("echo", *[str((number * 50 + i) / 1000) for i in range(50)]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: [Verdict((n * 50 + i) / 1000, "ok") for i in range(50)] for n in range(8)}


def test_verdicts_come_while_others_are_asked_for(pool: RewardPool, tmp_path: Path) -> None:
    file = tmp_path / "go"
    waiting = pool.submit(ask("wait_for", "a", file=str(file))[0])
    assert pool.submit(ask("echo", "0.5")[0]).result() == Verdict(0.5, "ok")
    assert not waiting.done()
    file.touch()
    assert waiting.result() == Verdict(1.0, "ok")


def test_prompts_that_share_an_id_are_still_scored_apart(pool: RewardPool, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    pool.score([*ask("log", "a", log=str(one)), *ask("log", "a", log=str(two))])
    assert one.read_text() == two.read_text() == "a\n"


def test_printing_does_not_disturb(pool: RewardPool, capfd: pytest.CaptureFixture[str]) -> None:
    assert pool.score(ask("prints", "a", "b")) == [Verdict(1.0, "ok")] * 2
    assert capfd.readouterr() == ("", "")


def test_workers_import_neither_torch_nor_numpy(pool: RewardPool) -> None:
    assert pool.score(ask("light", "a")) == [Verdict(1.0, "ok")]


def test_every_worker_hashes_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = subprocess.run(
        [sys.executable, "-c", "print(hash('a text') % 1000 / 1000)"],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for value in ("", "random"):
        monkeypatch.setenv("PYTHONHASHSEED", value)
        with RewardPool(1, 5.0, resolve=RESOLVE) as pool:
            assert pool.score(ask("hash_seed", "a"))[0].reward == float(expected)


def test_verdicts_do_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    requests = [
        *ask("echo", *[f"0.{i}" for i in range(200)], "word", None),
        *ask("returns", "nan", "int"),
        *ask("hang", "hang", "a"),
        *ask("die", "die", "b", log=str(tmp_path / "log")),
        *ask("echo", *[f"0.{i}" for i in range(150, 300)]),
    ]
    results = []
    for workers in (1, 2, 3):
        with RewardPool(workers, 1.0, resolve=RESOLVE) as pool:
            results.append(pool.score(requests))
    assert results[0] == results[1] == results[2]
    assert [v.status for v in results[0][200:208]] == [
        *("broken", "no_answer", "invalid", "ok", "timeout", "ok", "crash", "ok")
    ]


def test_signals_meant_for_the_job_do_not_reach_the_workers(pool: RewardPool) -> None:
    pool.score(ask("echo", *map(str, [0, 1])))
    before = pool.pids
    for pid in before:
        assert os.getpgid(pid) != os.getpgid(0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(pid, number)
    assert pool.score(ask("echo", "0.25")) == [Verdict(0.25, "ok")]
    assert pool.pids == before


def test_workers_killed_between_calls_are_replaced(pool: RewardPool) -> None:
    pool.score(ask("echo", "1"))
    for _ in range(4):
        before = pool.pids
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        assert pool.score(ask("echo", "0.5", "0.25")) == [Verdict(0.5, "ok"), Verdict(0.25, "ok")]
    assert not set(before) & set(pool.pids)


def test_an_interrupted_call_leaves_nothing_behind() -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        with RewardPool(2, 30.0, resolve=RESOLVE) as pool:
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            with pytest.raises(KeyboardInterrupt):
                pool.score(ask("hang", "a", "hang", "b"))
            assert pool.pids == []
            assert pool.score(ask("echo", "0.5")) == [Verdict(0.5, "ok")]
    finally:
        signal.signal(signal.SIGALRM, previous)


def test_close_ends_what_is_under_way() -> None:
    pool = RewardPool(1, 60.0, resolve=RESOLVE)
    verdicts = [pool.submit(request) for request in ask("hang", "hang", "b", "c")]
    (pid,) = pool.pids
    pool.close()
    for verdict in verdicts:
        with pytest.raises(RuntimeError, match="closed before its verdict"):
            verdict.result()
    assert not alive(pid)
    for late in ("a", None):
        with pytest.raises(RuntimeError, match="pool is closed"):
            pool.submit(ask("echo", late)[0])
    pool.cancel()  # nothing is left to give up


def test_what_is_given_up_is_judged_when_it_is_asked_again() -> None:
    with RewardPool(1, 60.0, resolve=RESOLVE) as pool:
        echoed, hung = ask("echo", "0.5"), ask("hang", "hang")
        verdicts = [pool.submit(request) for request in (*hung, *echoed)]
        pool.cancel()
        assert [verdict.cancelled() for verdict in verdicts] == [True, True]
        assert pool.score(echoed) == [Verdict(0.5, "ok")]


def test_workers_outlive_the_thread_that_asked_for_them() -> None:
    """On Linux they are tied to the thread that starts them."""
    made: list[RewardPool] = []
    thread = threading.Thread(target=lambda: made.append(RewardPool(1, 20.0, resolve=RESOLVE)))
    thread.start()
    thread.join()
    with made[0] as pool:
        before = pool.pids
        assert pool.score(ask("echo", "0.5")) == [Verdict(0.5, "ok")]
        assert pool.pids == before


def test_a_pool_leaves_no_thread_and_no_file_behind() -> None:
    with RewardPool(1, 20.0, resolve=RESOLVE) as pool:
        pool.score(ask("echo", "1"))
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with RewardPool(2, 20.0, resolve=RESOLVE) as pool:
            os.kill(pool.pids[0], signal.SIGKILL)
            pool.score(ask("echo", "1", "0"))
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, files)


def test_close_ends_the_workers() -> None:
    pool = RewardPool(2, 5.0, resolve=RESOLVE)
    pids = pool.pids
    pool.close()
    pool.close()
    assert not any(alive(pid) for pid in pids)
    with pytest.raises(RuntimeError, match="closed"):
        pool.score([])
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(ask("echo", "1")[0])


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["1", "hang"], ids=["idle", "inside a hang"])
def test_workers_die_with_their_parent(answer: str) -> None:
    code = f"""
import sys, threading, time
sys.path.insert(0, {str(HERE)!r})
from megatron_brorl.rewards.pool import RewardPool, ScoreRequest
from megatron_brorl.types import Prompt, Verdict
pool = RewardPool(1, 0.9, resolve={RESOLVE!r})
item = [ScoreRequest(Prompt("p", "t", (1,), None, "hang_in_c"), {answer!r})]
pool.score(item[:0] if {answer!r} == "hang" else item)
print(*pool.pids, flush=True)
pool.score(item)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(0.4)
    assert alive(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    end = time.monotonic() + 15
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(pid)


def test_a_worker_that_cannot_start_is_an_error_in_words() -> None:
    with (
        RewardPool(1, 5.0, resolve="no_such_module:f") as pool,
        pytest.raises(UserError, match=r"reward worker cannot start: ModuleNotFoundError.*no_such_module"),
    ):
        pool.score(ask("echo", "1"))


def test_the_registry_is_what_a_run_uses() -> None:
    with RewardPool(1, 5.0) as pool:
        request = ScoreRequest(Prompt("p", "t", (1,), "4", "exact"), " 4\n")
        assert pool.score([request]) == [Verdict(1.0, "ok")]
        with pytest.raises(UserError, match="os:system"):  # Python's own library holds no verifier
            pool.score([ScoreRequest(Prompt("p", "t", (1,), "4", "os:system"), "true")])


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
