"""What is kept of a step's verdicts, and for how long."""

from __future__ import annotations

from concurrent.futures import Future

from megatron_brorl.rewards import cache
from megatron_brorl.rewards.cache import VerdictCache
from megatron_brorl.types import Verdict


def verdict(reward: float = 1.0) -> Future[Verdict]:
    future: Future[Verdict] = Future()
    future.set_result(Verdict(reward, "ok"))
    return future


def test_a_verdict_to_come_is_shared() -> None:
    kept, coming = VerdictCache(), Future[Verdict]()
    kept.put("a", coming, 1, None)
    assert kept.get("a") is coming
    assert kept.get("b") is None
    kept.clear()
    assert kept.get("a") is None


def test_the_oldest_go_where_room_is_short() -> None:
    """Each answer costs its characters and a fixed sum: room for three of 100."""
    kept = VerdictCache(3 * (100 + cache._EACH))
    for i in range(5):
        kept.put(i, verdict(i / 4), 100, None)
    assert [kept.get(i) is not None for i in range(5)] == [False, False, True, True, True]
    # Twice as long as room for one leaves: two go, and the new one stays.
    kept.put("long", verdict(), 200 + cache._EACH, None)
    assert [kept.get(i) is not None for i in (2, 3, 4, "long")] == [False, False, True, True]
    # Put again, a key takes its room once.
    for _ in range(9):
        kept.put("long", verdict(), 200 + cache._EACH, None)
    assert kept.get(4) is not None
    assert len(kept) == 2
    kept.put("too long", verdict(), 10_000, None)
    assert len(kept) == 0


def test_no_verdict_is_shared_that_never_came() -> None:
    kept, cancelled, failed = VerdictCache(), Future[Verdict](), Future[Verdict]()
    cancelled.cancel()
    failed.set_exception(RuntimeError("closed"))
    kept.put("cancelled", cancelled, 1, None)
    kept.put("failed", failed, 1, None)
    assert kept.get("cancelled") is None
    assert kept.get("failed") is None


def test_what_a_key_names_by_its_identity_stays() -> None:
    """Or another object would get its place in memory, and the verdict."""
    kept = VerdictCache()
    for i in range(100):
        data = {"n": i}
        assert kept.get(id(data)) is None
        kept.put(id(data), verdict(), 1, data)
