"""A Python function as the verifier of a run, called in this process by one thread.

A notebook's function is in no file that a scoring process could load, and a fork of a process with torch's threads may
hang: so it runs here. What that costs: no time limit, no memory limit, and the trainer's own interpreter lock. A
function that hangs hangs the run; one that raises or returns nonsense costs its answer the reward, as elsewhere.
"""

from __future__ import annotations

import hashlib
import inspect
import marshal
import textwrap
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from megatron_brorl.rewards.own import check_parameters
from megatron_brorl.rewards.pool import RewardPool, ScoreRequest
from megatron_brorl.rewards.protocol import STATUSES, Item
from megatron_brorl.rewards.verifier import VerifierRow
from megatron_brorl.rewards.worker import judge
from megatron_brorl.types import Prompt, Verdict

NAME = "this_process:reward"  # in place of a verifier's name: the form of a user's own, of which nothing is imported

OwnReward = Callable[[str, VerifierRow], Any]  # returns what rewards.returned takes


def check(function: OwnReward) -> None:
    """Raise UserError unless it can be called as verifiers are."""
    check_parameters(function, "reward")


def sha256(function: OwnReward) -> str:
    """Of its source; of its compiled code where there is none to read, else of its name."""
    try:
        text = textwrap.dedent(inspect.getsource(function)).encode()
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        name = f"{type(function).__module__}.{type(function).__qualname__}.{getattr(function, '__name__', '')}"
        text = marshal.dumps(code) if code else name.encode()
    return hashlib.sha256(text).hexdigest()


def verdict(function: OwnReward, prompt: Prompt, answer: str) -> Verdict:
    """What the function says of an answer, in the form of a scoring process's verdict."""
    row = VerifierRow(id=prompt.id, prompt=prompt.text, answer=prompt.answer, metadata=prompt.metadata)
    found = judge(function, Item(NAME, row, answer))
    return Verdict(found.reward, STATUSES[found.status], found.reason, found.parts)  # type: ignore[arg-type]


def pool(
    function: OwnReward | None,
    workers: int,
    timeout_s: float,
    impure: frozenset[str] = frozenset(),
) -> RewardPool:
    """A RewardPool, with the function for the verifier NAME where there is one."""
    if function is None:
        return RewardPool(workers, timeout_s, impure=impure)
    return PoolWithFunction(function, workers, timeout_s, impure)


def _one_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="reward")


class PoolWithFunction(RewardPool):
    """A pool that asks the function for requests of the verifier NAME, and its processes for all others."""

    def __init__(
        self,
        function: OwnReward,
        workers: int,
        timeout_s: float,
        impure: frozenset[str],
    ) -> None:
        super().__init__(workers, timeout_s, impure=impure)
        self._function = function
        self._thread = _one_thread()

    def submit(self, request: ScoreRequest) -> Future[Verdict]:
        """See RewardPool; each answer is judged anew."""
        if request.prompt.verifier != NAME or request.answer is None:
            return super().submit(request)
        return self._thread.submit(verdict, self._function, request.prompt, request.answer)

    def cancel(self) -> None:
        """See RewardPool; the answer that the function is at goes on."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._thread = _one_thread()
        super().cancel()

    def close(self) -> None:
        """See RewardPool; waits for the answer that the function is at."""
        self._thread.shutdown(cancel_futures=True)
        super().close()
