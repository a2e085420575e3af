"""Rollouts that an engine process is asked for: numbers, rooms and what becomes of those that never come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import fakes
import torch

from megatron_brorl.ops.philox import stream_key
from megatron_brorl.rollout.engine import Request, Sampling
from megatron_brorl.rollout.remote.messages import Message
from megatron_brorl.rollout.remote.pending import PendingRollouts


def test_rollouts_are_taken_as_others_are_answered():
    """As many at a time as the engine has room for, numbered on; those that never come are as they were."""
    a, b = fakes.prompts(2)
    later = [Request(b, 7, 3), Request(b, 7, 3, first=3)]

    class Queue:
        rows, prompt_tokens = 6, 9
        rooms: ClassVar[list[int]] = []

        def take(self, room, rows):
            assert rows == 5 - room
            self.rooms.append(room)
            return [later.pop(0)] if later else []

    told = []
    watch = SimpleNamespace(finished=lambda request, rollout: told.append((request, rollout.index)))
    sampling = Sampling(1.0, 1.0, 0, 12, (2,))
    pending = PendingRollouts(sampling, watch, Queue(), 5)
    assert list(pending.add([Request(a, 5, 4)])) == [0, 1, 2, 3]
    assert list(pending.take()) == [4, 5, 6]
    assert pending.take() == {}  # it has more than there is room for already
    for number in (1, 5, 0):
        tensors = {"ids": torch.tensor([number, 2]), "log_probs": torch.zeros(2)}
        pending.answered(Message("rollout", {"number": number, "finish": "stop"}, tensors), 4)
    new = pending.take()
    assert list(new) == [7, 8, 9]
    assert [row.seed for row in new.values()] == [stream_key("engine", 7, i, 0) for i in (3, 4, 5)]
    assert Queue.rooms == [1, 1]
    assert told == [(0, 1), (1, 1), (0, 0)]
    result = pending.result()
    assert [[r.index for r in rollouts] for rollouts in result] == [[0, 1, 2, 3], [0, 1, 2], [3, 4, 5]]
    assert [(r.token_ids.tolist(), r.finish) for r in result[1]] == [([], "cut"), ([5, 2], "stop"), ([], "cut")]
    assert told == [(0, 1), (1, 1), (0, 0)]
