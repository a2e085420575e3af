"""Finished rollouts on disk until their step is over, so that a step that was killed samples only what it had not.

Every rank appends to a file of its own in one folder. A rollout is found again by what was asked of whom: engine and
weights, how responses are drawn, stream key, sibling, prompt and the tokens that it goes on from. Which rank asked is
no part of it: after a restart there may be more of them, or fewer.

A record is written by one call as its rollout ends, and never synced. What a killed process wrote is the kernel's
already; a node that dies takes along what the kernel had not written back, which is its last half-minute (Linux's
vm.dirty_expire_centisecs). A torn record (rollout.records) is not found, and its rollout is sampled again.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from io import BufferedWriter
from itertools import groupby
from pathlib import Path

from megatron_brorl.rollout.engine import Request, Sampling, Supply
from megatron_brorl.rollout.records import Place, decoded, encoded, places
from megatron_brorl.rollout.watchdog import Finished, GenerationResult, Watchdog
from megatron_brorl.types import Rollout

FOLDER = "unfinished_step"  # in run.dir
_SUFFIX = ".rollouts"


class DurableRollouts:
    """What the requests and the rollouts of one rank go through on their way to the engine and back."""

    def __init__(self, folder: Path, rank: int, engine: str) -> None:
        """folder: one for all ranks, made when there is something to write. engine: what decides, beside the weights
        that it is given, what it computes."""
        self.folder, self.rank, self.engine = folder, rank, engine
        self._recovered = 0
        # Of earlier processes. A file of another rank of this one may be among them already; it is as good.
        self._left = sorted(folder.glob(f"*{_SUFFIX}"))
        self._weights = (-1, 0)  # version, checksum
        self._places: dict[bytes, Place] = {}  # by identity
        self._file: BufferedWriter | None = None
        self._failed = False

    def begin(self, version: int, checksum: int) -> None:
        """The engines of all ranks have these weights from here on, so that the step before is over.

        What older weights sampled goes. What later ones did stays: a run that goes on from an older checkpoint comes to
        them once more.
        """
        self._discard()
        self._remove([path for path in self._left if _version(path) < version])
        self._weights, self._places = (version, checksum), {}
        for path in self._left:
            if path.name.startswith(self._prefix()):
                with self._tolerant():
                    self._places |= dict(places(path))

    def generate(
        self,
        engine: Watchdog,
        requests: Sequence[Request],
        sampling: Sampling,
        finished: Finished,
        supply: Supply | None = None,
    ) -> GenerationResult:
        """As engine.generate, whose weights `begin` has named, but asks it only for what no earlier process left."""
        call = _Call(self, sampling, finished)
        result = engine.generate(call.add(requests), sampling, call.ended, _Missing(call, supply) if supply else None)
        call.settle(result)
        self._recovered += call.recovered
        rollouts = [[there[k] for k in sorted(there)] for there in call.found]
        return GenerationResult(call.requests, rollouts, result.late, call.recovered_tokens)

    def identities(self, request: Request, sampling: Sampling) -> dict[int, bytes]:
        """Of each sibling: a hash of everything that decides its tokens, its log-probs and its spans."""
        asked = (self.engine, self._weights, sampling, request.key, request.prompt.token_ids)
        shared = hashlib.blake2b(repr(asked).encode(), digest_size=16)
        identities = {}
        before = {r.index: r for r in request.begun}
        for sibling in range(request.first, request.first + request.n):
            own = shared.copy()
            own.update(sibling.to_bytes(8, "little"))
            begun = before.get(sibling)
            if begun and len(begun.token_ids):
                own.update(encoded(b"", begun))
            identities[sibling] = own.digest()
        return identities

    def read(self, identities: Mapping[int, bytes]) -> dict[int, Rollout]:
        """The rollouts that are on disk, by sibling."""
        there = [(self._places[name], sibling) for sibling, name in identities.items() if name in self._places]
        rollouts = {}
        there.sort(key=lambda x: (x[0].path, x[0].start))
        for path, of_file in groupby(there, key=lambda x: x[0].path):
            with self._tolerant(), open(path, "rb") as file:
                for place, sibling in of_file:
                    file.seek(place.start)
                    rollout = decoded(file.read(place.size), sibling)
                    if rollout:
                        rollouts[sibling] = rollout
        return rollouts

    def append(self, identity: bytes, rollout: Rollout) -> None:
        """Keep a rollout; where the disk fails, say so once and keep no more."""
        if self._failed:
            return
        with self._tolerant():
            if self._file is None:
                self._file = self._create()
            self._file.write(encoded(identity, rollout))
            self._file.flush()

    def take_recovered(self) -> int:
        """How many rollouts were not sampled because an earlier process had, since this was last asked."""
        recovered, self._recovered = self._recovered, 0
        return recovered

    def close(self, over: bool) -> None:
        """Remove this process's file, which its next step does not need; over: and all others, for there is none."""
        self._discard()
        if over:
            self._remove(list(self._left))
        with contextlib.suppress(OSError):  # not empty, or not there
            self.folder.rmdir()

    def _create(self) -> BufferedWriter:
        """The first file of this rank and these weights that no process has yet."""
        self.folder.mkdir(parents=True, exist_ok=True)
        number = 0
        while True:
            with contextlib.suppress(FileExistsError):
                return open(self.folder / f"{self._prefix()}{self.rank}_{number}{_SUFFIX}", "xb")
            number += 1

    def _prefix(self) -> str:
        """Of the names of files that hold what the weights in use have sampled."""
        version, checksum = self._weights
        return f"{version}_{checksum & (1 << 64) - 1:016x}_"

    def _discard(self) -> None:
        """Remove the file that this process writes."""
        if self._file is not None:
            with self._tolerant():
                Path(self._file.name).unlink(missing_ok=True)
                self._file.close()
        self._file = None

    def _remove(self, paths: Sequence[Path]) -> None:
        self._left = [path for path in self._left if path not in paths]
        if self.rank == 0:
            for path in paths:
                with self._tolerant():
                    path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _tolerant(self) -> Iterator[None]:
        """A disk that fails costs what could have been recovered, and never the run."""
        try:
            yield
        except OSError as e:
            if not self._failed:
                self._failed = True
                text = f"warning: rank {self.rank}: {self.folder}: {e.strerror or e}; no more rollouts are kept there"
                with contextlib.suppress(OSError):  # nobody reads the pipe any more
                    print(text, file=sys.stderr, flush=True)


class _Call:
    """One call of generate: what was asked, what of it was there, and what became of the rest."""

    def __init__(self, durable: DurableRollouts, sampling: Sampling, tell: Finished) -> None:
        self._durable, self._sampling, self._tell = durable, sampling, tell
        self.requests: list[Request] = []  # of the caller
        self.found: list[dict[int, Rollout]] = []  # of each of them, by sibling
        self.recovered, self.recovered_tokens = 0, 0
        self._identities: list[dict[int, bytes]] = []  # likewise
        self._parts: list[tuple[int, Request]] = []  # what the engine is asked, and for which request of the caller

    def add(self, requests: Sequence[Request]) -> list[Request]:
        """Further requests of the caller; returns those for the engine. What is there is told at once."""
        first = len(self._parts)
        for request in requests:
            number = len(self.found)
            self.requests.append(request)
            identities = self._durable.identities(request, self._sampling)
            there = self._durable.read(identities)
            self._identities.append(identities)
            self.found.append(there)
            self.recovered += len(there)
            # What a carried rollout had before this step was sampled in another one.
            begun = {r.index: len(r.token_ids) for r in request.begun}
            self.recovered_tokens += sum(len(r.token_ids) - begun.get(r.index, 0) for r in there.values())
            for rollout in there.values():
                if rollout.finish != "cut":
                    self._tell(number, rollout)
            self._parts += [(number, part) for part in _without(request, there)]
        return [part for _, part in self._parts[first:]]

    def number(self, part: int) -> int:
        """The caller's request that a part is of."""
        return self._parts[part][0]

    def ended(self, part: int, rollout: Rollout) -> None:
        """watchdog.Finished, for what the engine was asked."""
        number, _ = self._parts[part]
        self._durable.append(self._identities[number][rollout.index], rollout)
        self._tell(number, rollout)

    def settle(self, result: GenerationResult) -> None:
        """Take what came of the engine's call."""
        for (number, request), rollouts in zip(self._parts, result.rollouts, strict=False):  # a stuck engine may take
            begun = {r.index: len(r.token_ids) for r in request.begun}
            for rollout in rollouts:
                # What has spent its budget is done for this step too; what was told to stop is not.
                spent = len(rollout.token_ids) == begun.get(rollout.index, 0) + self._sampling.budget
                if rollout.finish == "cut" and spent:
                    self._durable.append(self._identities[number][rollout.index], rollout)
                self.found[number][rollout.index] = rollout


class _Missing:
    """A supply without what earlier processes left: a rollout.engine.Supply."""

    def __init__(self, call: _Call, supply: Supply) -> None:
        self._call, self._supply = call, supply
        self.rows, self.prompt_tokens = supply.rows, supply.prompt_tokens

    def take(self, room: int) -> list[Request]:
        """See Supply. What is there leaves its room to what comes after it, for nothing would end the engine's call."""
        while requests := self._supply.take(room):
            if missing := self._call.add(requests):
                return missing
        return []

    def wait(self) -> bool:
        """See Supply."""
        return self._supply.wait()


def _version(path: Path) -> int:
    """Of the weights, by the name of a file; -1 where the name is not one of ours."""
    number = path.name.partition("_")[0]
    return int(number) if number.isdecimal() else -1


def _without(request: Request, found: Mapping[int, Rollout]) -> Iterator[Request]:
    """Requests for the siblings that were not found, one per run of consecutive ones."""
    missing = [i for i in range(request.first, request.first + request.n) if i not in found]
    for _, run in groupby(enumerate(missing), key=lambda x: x[1] - x[0]):
        wanted = [sibling for _, sibling in run]
        begun = tuple(r for r in request.begun if wanted[0] <= r.index <= wanted[-1])
        yield replace(request, first=wanted[0], n=len(wanted), begun=begun)
