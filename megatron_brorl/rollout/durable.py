"""Finished rollouts on disk until their step is over, so that a step that was killed samples only what it had not.

Every rank appends to a file of its own in one folder. A rollout is found again by what was asked of whom: engine and
weights, how responses are drawn, stream key, sibling, prompt and the tokens that it goes on from. Which rank asked is
no part of it: after a restart there may be more of them, or fewer.

A record is written by one call as its rollout ends, and never synced. What a killed process wrote is the kernel's
already; a node that dies takes along what the kernel had not written back, which is its last half-minute (Linux's
vm.dirty_expire_centisecs). Records have checksums: a torn one is not found, and its rollout is sampled again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BufferedWriter
from itertools import chain, groupby
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from megatron_brorl.rollout.engine import Request, Sampling
from megatron_brorl.rollout.watchdog import Finished, GenerationResult, Watchdog
from megatron_brorl.types import FinishReason, Rollout

FOLDER = "unfinished_step"  # in run.dir
_SUFFIX = ".rollouts"
_FINISH: tuple[FinishReason, ...] = get_args(FinishReason)

# A record: the head, a CRC-32 of all the rest, spans (two int64 each), token ids (int32), log-probs (float32).
_MAGIC = b"brl1"
_HEAD = struct.Struct("<4s16sBII")  # magic, identity, place in _FINISH, spans, tokens
_CRC = struct.Struct("<I")
_FIXED = _HEAD.size + _CRC.size


@dataclass(frozen=True)
class _Place:
    """Where a record lies, in bytes."""

    path: Path
    start: int
    size: int


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
        self._places: dict[bytes, _Place] = {}  # by identity
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
                    self._places |= dict(_records(path))

    def generate(
        self, engine: Watchdog, requests: Sequence[Request], sampling: Sampling, finished: Finished
    ) -> GenerationResult:
        """As engine.generate, whose weights `begin` has named, but asks it only for what no earlier process left."""
        wanted = [self._identities(request, sampling) for request in requests]
        found = [self._recover(identities) for identities in wanted]
        self._recovered += sum(map(len, found))
        for i, there in enumerate(found):
            for rollout in there.values():
                if rollout.finish != "cut":
                    finished(i, rollout)

        # The engine numbers what it is asked for; `origin` has the numbers of the caller.
        parts = [(i, part) for i, request in enumerate(requests) for part in _without(request, found[i])]
        origin = [i for i, _ in parts]

        def ended(part: int, rollout: Rollout) -> None:
            self._append(wanted[origin[part]][rollout.index], rollout)
            finished(origin[part], rollout)

        result = engine.generate([part for _, part in parts], sampling, ended)

        # What has spent its budget is done for this step too; what was told to stop is not.
        for i, request, rollouts in zip(origin, (part for _, part in parts), result.rollouts, strict=True):
            begun = {r.index: len(r.token_ids) for r in request.begun}
            for rollout in rollouts:
                if rollout.finish == "cut" and len(rollout.token_ids) == begun.get(rollout.index, 0) + sampling.budget:
                    self._append(wanted[i][rollout.index], rollout)
                found[i][rollout.index] = rollout
        return GenerationResult([[there[k] for k in sorted(there)] for there in found], result.late)

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

    def _identities(self, request: Request, sampling: Sampling) -> dict[int, bytes]:
        """Of each sibling: a hash of everything that decides its tokens, its log-probs and its spans."""
        asked = (self.engine, self._weights, sampling, request.key, request.prompt.token_ids)
        shared = hashlib.blake2b(repr(asked).encode(), digest_size=16)
        identities = {}
        before = {r.index: r for r in request.begun}
        for sibling in range(request.first, request.first + request.n):
            own = shared.copy()
            own.update(sibling.to_bytes(8, "little"))
            if begun := before.get(sibling):
                own.update(_encoded(b"", begun))
            identities[sibling] = own.digest()
        return identities

    def _recover(self, identities: Mapping[int, bytes]) -> dict[int, Rollout]:
        """The rollouts that are on disk, by sibling."""
        there = [(self._places[name], sibling) for sibling, name in identities.items() if name in self._places]
        rollouts = {}
        for path, places in groupby(sorted(there, key=lambda x: (x[0].path, x[0].start)), key=lambda x: x[0].path):
            with self._tolerant(), open(path, "rb") as file:
                for place, sibling in places:
                    file.seek(place.start)
                    rollout = _decoded(file.read(place.size), sibling)
                    if rollout:
                        rollouts[sibling] = rollout
        return rollouts

    def _append(self, identity: bytes, rollout: Rollout) -> None:
        if self._failed:
            return
        with self._tolerant():
            if self._file is None:
                self._file = self._create()
            self._file.write(_encoded(identity, rollout))
            self._file.flush()

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


def _encoded(identity: bytes, rollout: Rollout) -> bytes:
    """A record."""
    tokens, spans = len(rollout.token_ids), len(rollout.spans)
    head = _HEAD.pack(_MAGIC, identity, _FINISH.index(rollout.finish), spans, tokens)
    ids, log_probs = rollout.token_ids.numpy(), rollout.log_probs.numpy()
    versions = struct.pack(f"<{2 * spans}q", *chain.from_iterable(rollout.spans))
    body = versions + ids.astype("<i4").tobytes() + log_probs.astype("<f4", copy=False).tobytes()
    return head + _CRC.pack(zlib.crc32(body, zlib.crc32(head))) + body


def _decoded(record: bytes, sibling: int) -> Rollout | None:
    """The rollout of a record; None where it is damaged."""
    head, body = record[: _HEAD.size], record[_FIXED:]
    if len(record) < _FIXED or _CRC.unpack_from(record, _HEAD.size)[0] != zlib.crc32(body, zlib.crc32(head)):
        return None
    _, _, finish, spans, tokens = _HEAD.unpack(head)
    versions = np.frombuffer(body, "<i8", 2 * spans).reshape(-1, 2).tolist()
    ids = np.frombuffer(body, "<i4", tokens, 16 * spans).astype(np.int64)
    log_probs = np.frombuffer(body, "<f4", tokens, 16 * spans + 4 * tokens).astype(np.float32)
    own = tuple((version, count) for version, count in versions)
    return Rollout(sibling, torch.from_numpy(ids), torch.from_numpy(log_probs), _FINISH[finish], own)


def _records(path: Path) -> Iterator[tuple[bytes, _Place]]:
    """Identity and place of every record of a file, up to one that is torn."""
    with open(path, "rb", buffering=0) as file:
        end, at = os.fstat(file.fileno()).st_size, 0
        while at + _FIXED <= end:
            magic, identity, _, spans, tokens = _HEAD.unpack(os.pread(file.fileno(), _HEAD.size, at))
            size = _FIXED + 16 * spans + 8 * tokens
            if magic != _MAGIC or at + size > end:
                return
            yield identity, _Place(path, at, size)
            at += size
