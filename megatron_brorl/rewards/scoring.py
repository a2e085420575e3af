"""From sampled responses to rewards, while others are still being sampled."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from megatron_brorl.config.schema import RewardConfig
from megatron_brorl.rewards.extract import Found, extract
from megatron_brorl.rewards.registry import entry
from megatron_brorl.rewards.verifier import Entry
from megatron_brorl.rewards.worker_pool import RewardPool, ScoreRequest
from megatron_brorl.types import Prompt, Rollout, Status, Verdict

_RAISED = {
    "error": "verifier {} raised on an answer, which scores 0 (figure verdict_errors)",
    "broken": "verifier {} is broken: it raises on a reference answer too",
    "invalid": "verifier {} gave no score, so that its answer scores 0",
}


@dataclass(frozen=True)
class Scores:
    """What the verifiers made of B rollouts."""

    rewards: Tensor  # [B] float32
    right: list[bool]  # whether each counts as correct
    answers: list[str | None]  # what of each response was judged; None: it has no answer, or was not looked at
    verdicts: list[Verdict]
    counts: dict[str, int]  # rollouts of each status of Verdict, and "length": those not looked at
    raised: dict[str, str]  # of each verifier that raised or gave no score, in words: the first time


class Scorer:
    """Has the rollouts of one call of the engine judged as they end; a context manager.

    Texts are decoded, and answers found in them, in a thread of its own: the engine's goes on at once.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        decode: Callable[[list[int]], str],
        stop_ids: Sequence[int],
        pool: RewardPool,
        config: RewardConfig,
    ) -> None:
        """prompts: of each request to the engine; more may be added. A response's text is without the token of stop_ids
        that ends it."""
        self._prompts, self._decode, self._stop_ids = prompts, decode, stop_ids
        self._pool, self._config = pool, config
        self._entries: dict[str, Entry] = {}  # by name, as they are met
        self._found: dict[tuple[str, bytes], Found] = {}  # siblings repeat one another: each is decoded once
        self._judged: dict[tuple[int, int], _Judged] = {}

        # What ends here, None last; a daemon, which the end of the process does not wait for.
        self._ended: SimpleQueue[tuple[int, Rollout] | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._given_up = False
        self._thread = threading.Thread(target=self._serve, name="scoring", daemon=True)
        self._thread.start()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        # Of a call that failed nobody takes the verdicts any more.
        if kind is not None:
            self._given_up = True
        self._ended.put(None)
        self._thread.join()
        if kind is not None:
            self._pool.cancel()

    def finished(self, request: int, rollout: Rollout) -> None:
        """A rollout of prompts[request] has ended: rollout.watchdog.Finished, for the thread that generates.

        Raises what went wrong with an earlier one, so that the engine need not go on.
        """
        if self._error:
            raise self._error
        self._ended.put((request, rollout))

    def scores(self, places: Sequence[tuple[int, int]]) -> Scores:
        """What the verifiers made of the rollouts (request, sibling), all of which have ended; waits for them.

        `worth` says what a verdict is worth. A response that was cut off is not looked at where its reward could only
        be 0.
        """
        # All have been decoded first.
        self._ended.put(None)
        self._thread.join()
        if self._error:
            raise self._error
        judged = [self._judged[place] for place in places]
        verdicts = [each.verdict.result() for each in judged]

        # Rewards, in float32 as they are carried.
        # What counts as correct is decided here, from the verifier's own reward; everything else carries it along.
        worths = [worth(v, each.cut_off, self._config) for v, each in zip(verdicts, judged, strict=True)]
        rewards = torch.tensor([reward for reward, _ in worths], dtype=torch.float32)

        # How the verifiers fared.
        counts = Counter(dict.fromkeys((*get_args(Status), "length"), 0))
        counts.update("length" if each.unseen else v.status for v, each in zip(verdicts, judged, strict=True))
        raised: dict[str, str] = {}
        for (request, _), verdict in zip(places, verdicts, strict=True):
            if verdict.status in _RAISED:
                prompt = self._prompts[request]
                row = f"row {prompt.id}: " if verdict.status == "invalid" else ""
                raised.setdefault(_RAISED[verdict.status].format(verifier_name(prompt)), row + verdict.reason)
        right = [correct for _, correct in worths]
        return Scores(rewards, right, [each.answer for each in judged], verdicts, dict(counts), raised)

    def _serve(self) -> None:
        try:
            while (ended := self._ended.get()) is not None and not self._given_up:
                request, rollout = ended
                self._judged[request, rollout.index] = self._judge(self._prompts[request], rollout)
        except BaseException as e:
            self._error = e  # for who delivers next, and for who asks for the scores

    def _judge(self, prompt: Prompt, rollout: Rollout) -> _Judged:
        cut_off = rollout.finish == "length"
        unseen = cut_off and not judged_when_cut_off(self._entry(prompt.verifier), self._config)
        found = Found(None, "cut off") if unseen else self._find(prompt, rollout)
        verdict = self._pool.submit(ScoreRequest(prompt, *found))
        return _Judged(cut_off, unseen, found.answer, verdict)

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            self._entries[name] = entry(name, "verifier", self._config)
        return self._entries[name]

    def _find(self, prompt: Prompt, rollout: Rollout) -> Found:
        ids = without_stop(rollout.token_ids, self._stop_ids)
        key = (prompt.verifier, hashlib.blake2b(ids.numpy().tobytes(), digest_size=16).digest())
        if key not in self._found:
            # An answer is found as its verifier looks for it, or as the configuration has it for all.
            judged_by = self._entry(prompt.verifier)
            self._found[key] = extract(self._decode(ids.tolist()), judged_by.find, judged_by.max_chars)
        return self._found[key]


def worth(verdict: Verdict, cut_off: bool, config: RewardConfig) -> tuple[float, bool]:
    """The reward of a response with this verdict, and whether the response counts as correct.

    Correct is a verifier's own reward of at least reward.correct_at, both rounded to float32: 0.7 + 0.2 + 0.1, which is
    below 1 in float64, passes for 1, and so does a reward of 0.9 that was computed in float32 for 0.9. A response that
    rollout.max_tokens cut off is correct only where reward.cut_off_factor is 1, and one that was not scored never is.
    """
    reaches = verdict.status == "ok" and bool(np.float32(verdict.reward) >= np.float32(config.correct_at))
    reward = float(reaches) if config.strict else verdict.reward
    if not cut_off:
        return reward, reaches
    # A factor below 1 would raise a negative reward, and make being cut off better than being wrong.
    return min(reward, config.cut_off_factor * reward), reaches and config.cut_off_factor == 1


def judged_when_cut_off(judged_by: Entry, config: RewardConfig) -> bool:
    """Whether the reward of a response that was cut off can be other than 0, so that its verifier looks at it."""
    return config.cut_off_factor > 0 or (judged_by.foreign and not config.strict)


def without_stop(token_ids: Tensor, stop_ids: Sequence[int]) -> Tensor:
    """The tokens [G] of a response's text: without the one of stop_ids that ends it."""
    return token_ids[:-1] if len(token_ids) and int(token_ids[-1]) in stop_ids else token_ids


@dataclass(frozen=True)
class _Judged:
    """A rollout that has ended."""

    cut_off: bool  # by rollout.max_tokens
    unseen: bool  # no verifier looked at it
    answer: str | None
    verdict: Future[Verdict]


def verifier_name(prompt: Prompt) -> str:
    """The verifier of a row, with its task where it has several."""
    task = prompt.metadata.get("source_dataset")
    return f"{prompt.verifier} ({task})" if task else prompt.verifier
