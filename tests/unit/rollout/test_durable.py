"""Rollouts that outlive their process: found again bit for bit by what was asked, and by nothing less."""

from __future__ import annotations

from dataclasses import dataclass, replace

import fakes
import pytest
import torch

from megatron_brorl.rollout.durable import DurableRollouts
from megatron_brorl.rollout.engine import Request, Sampling
from megatron_brorl.rollout.watchdog import Watchdog

SAMPLING = Sampling(1.0, 1.0, 0, 12, (fakes.STOP,))
IN_PARTS = replace(SAMPLING, budget=4)
FIRST, SECOND = fakes.prompts(2)
REQUESTS = [Request(FIRST, 11, 6), Request(SECOND, 12, 4, first=32)]
PLACES = [*((0, i) for i in range(6)), *((1, i) for i in range(32, 36))]
WEIGHTS = (4, -77)  # version, checksum


class Killed(Exception):
    pass


@dataclass
class DyingEngine(fakes.Engine):
    """Delivers so many rollouts and no more."""

    after: int = 10**9

    def generate(self, requests, sampling, watch=None, supply=None):
        return super().generate(requests, sampling, _Dying(watch, self.after), supply)


@dataclass
class _Dying:
    watch: Watchdog
    left: int

    def finished(self, request, rollout):
        if not self.left:
            raise Killed
        self.left -= 1
        self.watch.finished(request, rollout)

    def cancelled(self):
        return self.watch.cancelled()


class Process:
    """A rank from its start: it has the weights and may generate."""

    def __init__(self, folder, rank=0, weights=WEIGHTS, engine="exact", **faults):
        self.engine, self.recovered_tokens = DyingEngine(version=weights[0], **faults), 0
        self.durable = DurableRollouts(folder, rank, engine)
        self.durable.begin(*weights)

    def sample(self, requests=REQUESTS, sampling=SAMPLING, timeout_s=60.0):
        """Every rollout by (request, sibling), in plain values."""
        told = []
        watchdog = Watchdog(self.engine, timeout_s)
        result = self.durable.generate(watchdog, requests, sampling, lambda i, r: told.append((i, r.index)))
        assert [[r.index for r in rollouts] for rollouts in result.rollouts] == [
            sorted(r.index for r in rollouts) for rollouts in result.rollouts
        ]
        self.recovered_tokens = result.recovered_tokens
        found = {(i, r.index): r for i, rollouts in enumerate(result.rollouts) for r in rollouts}
        assert sorted(told) == [place for place, r in found.items() if r.finish != "cut"]  # each once
        return {place: plain(r) for place, r in found.items()}

    def asked(self, requests=REQUESTS):
        """What the engine was asked for, by (request, sibling)."""
        number = {request.prompt.id: i for i, request in enumerate(requests)}
        return [
            (number[r.prompt.id], i) for call in self.engine.calls for r in call for i in range(r.first, r.first + r.n)
        ]


def plain(r):
    assert (r.token_ids.dtype, r.log_probs.dtype) == (torch.int64, torch.float32)
    return r.token_ids.tolist(), r.log_probs.numpy().tobytes(), r.finish, r.spans


def by_hand(requests=REQUESTS, version=WEIGHTS[0]):
    """What the fake engine samples, from its own stream."""
    expected = {}
    for i, request in enumerate(requests):
        for sibling in range(request.first, request.first + request.n):
            (ids,) = fakes.draws(request.key, [sibling], 12)
            ids = ids[: ids.index(fakes.STOP) + 1] if fakes.STOP in ids else ids
            log_probs = torch.tensor([fakes.log_prob(drawn, version) for drawn in ids])
            finish = "stop" if ids[-1] == fakes.STOP else "length"
            expected[i, sibling] = ids, log_probs.numpy().tobytes(), finish, ((version, len(ids)),)
    return expected


def killed(folder, after=7, **settings):
    """A process that delivered the first 7 rollouts of REQUESTS, and its file."""
    with pytest.raises(Killed):
        Process(folder, after=after, **settings).sample()
    (path,) = folder.iterdir()
    return path


def test_a_killed_call_samples_the_rest_alone(tmp_path):
    killed(tmp_path)
    process = Process(tmp_path)
    assert process.sample() == by_hand()
    assert process.asked() == PLACES[7:]
    assert process.durable.take_recovered() == 7
    assert process.durable.take_recovered() == 0
    assert process.recovered_tokens == sum(len(by_hand()[place][0]) for place in PLACES[:7])
    # Killed again and again: what later processes add is found as well.
    third = Process(tmp_path)
    assert third.sample() == by_hand()
    assert third.asked() == []


def test_what_is_missing_in_between_is_asked_in_runs(tmp_path):
    Process(tmp_path).sample([replace(REQUESTS[0], n=1, first=1), replace(REQUESTS[0], n=2, first=4)])
    process = Process(tmp_path)
    assert process.sample() == by_hand()
    assert [(r.first, r.n) for r in process.engine.calls[0]] == [(0, 1), (2, 2), (32, 4)]


def test_ranks_may_be_more_or_fewer(tmp_path):
    """Two ranks wrote, with one of them killed; then one rank asks for all, or three with shares of their own."""
    Process(tmp_path, 0).sample([replace(REQUESTS[0], n=3), REQUESTS[1]])
    with pytest.raises(Killed):
        Process(tmp_path, 1, after=1).sample([replace(REQUESTS[0], n=3, first=3)])
    assert len(list(tmp_path.iterdir())) == 2
    shares = [[replace(REQUESTS[0], n=5)], [replace(REQUESTS[0], n=1, first=5)], [REQUESTS[1]]]
    processes = [Process(tmp_path, rank) for rank in range(3)]
    found = [process.sample(share) for process, share in zip(processes, shares, strict=True)]
    assert [process.asked(share) for process, share in zip(processes, shares, strict=True)] == [[(0, 4)], [(0, 5)], []]
    assert {**found[0], **found[1], **{(1, i): r for (_, i), r in found[2].items()}} == by_hand()
    alone = Process(tmp_path)
    assert alone.sample() == by_hand()
    assert alone.asked() == []


OTHERS = {
    "weights": ({"weights": (4, -78)}, {}, {}),
    "version": ({"weights": (3, -77)}, {}, {}),
    "engine": ({"engine": "rounded"}, {}, {}),
    "stream": ({}, {"key": 13}, {}),
    "prompt": ({}, {"prompt": replace(FIRST, token_ids=(*FIRST.token_ids[:-1], 5))}, {}),
    "siblings": ({}, {"first": 6}, {}),
    "temperature": ({}, {}, {"temperature": 0.5}),
    "length": ({}, {}, {"max_tokens": 11}),
    "budget": ({}, {}, {"budget": 4}),
}


class Listed:
    """A supply of requests in turn, whatever the room."""

    def __init__(self, requests):
        self.left = list(requests)
        self.rows, self.prompt_tokens = sum(r.n for r in requests), 8

    def take(self, room):
        return [self.left.pop(0)] if self.left else []


def test_what_an_engine_takes_as_it_goes_is_found_too(tmp_path):
    """Seven of twelve rollouts are there: all of the supply's first request, and one of the second."""
    killed(tmp_path)
    process, told = Process(tmp_path), []
    asked = [*REQUESTS, Request(FIRST, 13, 2, first=64)]
    watchdog, supply = Watchdog(process.engine, 60.0), Listed(asked)
    result = process.durable.generate(watchdog, [], SAMPLING, lambda i, r: told.append((i, r.index)), supply)
    found = {(i, r.index): plain(r) for i, rollouts in enumerate(result.rollouts) for r in rollouts}
    assert (result.requests, found) == (asked, by_hand(asked))
    assert sorted(told) == sorted(found)
    assert process.asked() == [*PLACES[7:], (0, 64), (0, 65)]
    assert process.durable.take_recovered() == 7


@pytest.mark.parametrize("change", OTHERS)
def test_what_was_not_asked_for_is_not_found(change, tmp_path):
    settings, request, sampling = OTHERS[change]
    Process(tmp_path).sample([REQUESTS[0]])
    process = Process(tmp_path, **settings)
    asked = [replace(REQUESTS[0], **request)]
    process.sample(asked, replace(SAMPLING, **sampling))
    assert len(process.asked(asked)) == 6
    assert process.durable.take_recovered() == 0


def records(path):
    """Where the records of a file begin, and its end, by the header alone: spans at byte 21, tokens at 25."""
    data, starts = path.read_bytes(), [0]
    while starts[-1] < len(data):
        spans, tokens = (int.from_bytes(data[starts[-1] + at :][:4], "little") for at in (21, 25))
        starts.append(starts[-1] + 33 + 16 * spans + 8 * tokens)
    return starts


@pytest.mark.parametrize("left", [0, 1, 20, 32, 33, 40, -1])
def test_a_torn_record_is_sampled_again(left, tmp_path):
    """Cut off after so many bytes of the last record, or before its last one."""
    path = killed(tmp_path)
    *_, start, end = records(path)
    path.write_bytes(path.read_bytes()[: end - 1 if left < 0 else start + left])
    process = Process(tmp_path)
    assert process.sample() == by_hand()
    assert process.asked() == PLACES[6:]
    again = Process(tmp_path)
    again.sample()
    assert again.asked() == []


@pytest.mark.parametrize(("at", "asked"), [(50, PLACES[3:4]), (31, PLACES[3:4]), (0, PLACES[3:7]), (5, PLACES[3:4])])
def test_a_damaged_record_is_sampled_again(at, asked, tmp_path):
    """A flipped bit in a token, in the checksum, in the magic number (nothing after it is read) or in the name."""
    path = killed(tmp_path)
    data = bytearray(path.read_bytes())
    data[records(path)[3] + at] ^= 4
    path.write_bytes(data)
    process = Process(tmp_path)
    assert process.sample() == by_hand()
    assert process.asked() == [*asked, *PLACES[7:]]


def test_rollouts_in_parts(tmp_path):
    """What has spent its budget is found; what was told to stop is not. The next step goes on from the same tokens."""
    whole = Process(tmp_path / "whole")
    first = whole.sample(sampling=IN_PARTS)
    cut = [place for place, (ids, _, finish, _) in first.items() if finish == "cut" and len(ids) == 4]
    assert len(cut) >= 3

    # A call that was cancelled while one sibling made no progress, and died afterwards.
    stalled = (REQUESTS[cut[0][0]].prompt.id, cut[0][1])
    Process(tmp_path, stall={stalled}).sample(sampling=IN_PARTS, timeout_s=0.1)
    process = Process(tmp_path)
    assert process.sample(sampling=IN_PARTS) == first
    assert process.asked() == [cut[0]]

    # The next step, with other weights, and killed after its call.
    later = (6, 5)
    begun = by_index(whole)
    asked = [replace(r, begun=tuple(begun[i])) for i, r in enumerate(REQUESTS)]
    second = Process(tmp_path / "second", weights=later).sample(asked, IN_PARTS)
    assert any(spans == ((4, 4), (6, 4)) for *_, spans in second.values())
    Process(tmp_path, weights=later).sample(asked, IN_PARTS)
    process = Process(tmp_path, weights=later)
    assert process.sample(asked, IN_PARTS) == second
    assert process.asked() == []
    # The tokens of this step alone: those of the one before were not recovered but carried.
    assert process.recovered_tokens == sum(n for *_, spans in second.values() for version, n in spans if version == 6)

    # A token, a log-probability or a span that was begun otherwise makes it another rollout.
    i, index = next(place for place, (_, _, _, spans) in second.items() if spans[0] == (4, 4))
    for change in ("token_ids", "log_probs", "spans"):
        others = [
            replace(r, begun=tuple(altered(b, change) if b.index == index else b for b in r.begun)) for r in asked
        ]
        process = Process(tmp_path, weights=later)
        process.sample([others[i]], IN_PARTS)
        assert [sibling for _, sibling in process.asked()] == [index]


def by_index(process):
    """The cut rollouts of a process that sampled REQUESTS in parts, per request."""
    result = process.durable.generate(Watchdog(process.engine, 60.0), REQUESTS, IN_PARTS, lambda *_: None)
    return [[r for r in rollouts if r.finish == "cut"] for rollouts in result.rollouts]


def altered(rollout, field):
    if field == "spans":
        return replace(rollout, spans=((3, 4),))
    values = getattr(rollout, field).clone()
    values[0] += 1
    return replace(rollout, **{field: values})


def test_files_go_when_their_step_is_over(tmp_path):
    """Of older weights all, of this process its own, of later weights none before their time."""
    for weights in ((4, 1), (6, 2), (8, 3)):
        killed(tmp_path / str(weights[0]), weights=weights)
    folder = tmp_path / "run"
    folder.mkdir()
    for path in tmp_path.glob("?/*"):
        path.rename(folder / path.name)

    def versions():
        return sorted(path.name.partition("_")[0] for path in folder.iterdir())

    # Goes on from a checkpoint with version 6.
    process, other = Process(folder, weights=(6, 2)), Process(folder, rank=1, weights=(6, 2))
    assert versions() == ["6", "8"]
    process.sample()
    other.sample([replace(REQUESTS[0], first=9)])
    assert process.asked() == PLACES[7:]
    assert versions() == ["6", "6", "6", "8"]
    other.durable.begin(6, 2)  # a step that updated nothing
    assert versions() == ["6", "6", "8"]
    for rank in (other, process):
        rank.durable.begin(8, 3)
    assert versions() == ["8"]
    process.engine.calls.clear()
    process.engine.version = 8
    assert process.sample() == by_hand(version=8)
    assert process.asked() == PLACES[7:]
    process.durable.close(over=False)  # for what a stopped run goes on with
    assert versions() == ["8"]
    process.durable.close(over=True)
    assert not folder.exists()


def test_a_disk_that_fails_costs_no_rollout(tmp_path, capfd):
    (tmp_path / "file").write_text("")
    process = Process(tmp_path / "file" / "folder")
    assert process.sample() == by_hand()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("warning: rank 0: ")
    assert line.endswith("Not a directory; no more rollouts are kept there")
    process.durable.close(over=True)
