"""Nothing hangs for ever: where no rank finishes anything, the job ends in one line that names the rank that is behind.

Every rank has a thread that writes how far it is into a file of run.dir/.progress and looks at those of the others; no
launcher is asked, and no rank has to answer. When the time is up the first that sees it says so, all ranks write the
stacks of their threads to run.dir/stacks, and all end with exit code 1. Behind is a rank that does not run at all, else
one that is not waiting in a collective, else the one that has passed the fewest spans (timeline.position).
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_brorl.timeline import position

FOLDER, STACKS = ".progress", "stacks"  # in run.dir
_TOLD = "told"  # in FOLDER: what was said, by whoever made it
_OBSERVERS = 8  # ranks that look at all others, so that no thousand do
_TURN_S = 2.5  # from one look to the next, at most; more where there are hundreds of files
_BYTES = 1024  # of a file, which is written in place: that needs no room on a disk that is full
_STOPPED, _SLOW = "has not run", "has come no further"
# Files of torch and Megatron in which a thread waits for other ranks.
_WAITING = ("torch/distributed/", "pipeline_parallel/p2p_communication.py", "distributed/param_and_grad_buffer.py")


@dataclass(frozen=True)
class Place:
    """How far a rank says that it is."""

    turns: int  # how often it has said so: it stands still where the process does
    finished: int  # pieces of work; 0: it has not begun
    passed: int  # spans begun and ended
    where: str  # the spans that it is in
    limit_s: float  # that may pass there besides
    waits: bool  # for other ranks, in a collective


def behind(places: Mapping[int, Place], silent: frozenset[int]) -> list[int]:
    """The ranks that the others wait for; silent: those whose process does not run."""
    if silent:
        return sorted(silent)
    busy = {rank: p for rank, p in places.items() if not p.waits} or places
    least = min((p.passed for p in busy.values()), default=0)
    return sorted(rank for rank, p in busy.items() if p.passed == least)


class Observer:
    """What was seen of all ranks, by a clock that stands while the observer itself is stopped."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._places: dict[int, Place] = {}
        self._turned: dict[int, float] = {}  # when a rank's thread was last seen to turn
        self._moved = self._now = 0.0  # when any rank was last seen to finish something

    def look(self, places: Mapping[int, Place], seconds: float) -> tuple[list[int], str, float] | None:
        """The ranks that are behind, how, and for how many seconds, where the time is up.

        places: of ranks that are not done. seconds: since the last look.
        """
        self._now += seconds
        for rank, place in places.items():
            before = self._places.get(rank)
            if before is None or place.turns != before.turns:
                self._turned[rank] = self._now
            if before is None or place.finished != before.finished:
                self._moved = self._now
        self._places = dict(places)

        # A rank that has not begun may load for as long as it takes.
        if any(not p.finished for p in places.values()):
            self._moved = self._now
            return None
        silent = frozenset(rank for rank in places if self._now - self._turned[rank] > self._timeout_s)
        limit = self._timeout_s + max((p.limit_s for p in places.values()), default=0.0)
        if not places or (not silent and self._now - self._moved <= limit):
            return None
        since = min(self._turned[rank] for rank in silent) if silent else self._moved
        return behind(places, silent), _STOPPED if silent else _SLOW, self._now - since


class Watch:
    """The thread of one rank. It ends the process where the job hangs."""

    def __init__(self, directory: Path, rank: int, world: int, timeout_s: float, late_s: float) -> None:
        """directory: run.dir. late_s: config key parallel.timeout_s."""
        self._folder, self._stacks = directory / FOLDER, directory / STACKS
        self._rank, self._world, self._timeout_s, self._late_s = rank, world, timeout_s, late_s
        self._turn_s = min(timeout_s / 8, max(_TURN_S, world / 100))
        self._thread = threading.get_ident()  # whose stack says whether it waits
        self._judges = rank < _OBSERVERS
        self._late = False  # its own wait is over, and was in vain
        self._through, self._stays = False, rank > 0  # with its own part of the job; until the main rank is
        self._done, self._turns = threading.Event(), 0
        self._lock = threading.Lock()

    @staticmethod
    def clear(directory: Path) -> None:
        """Forget the ranks of an earlier job; before any rank of this one starts its watch. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(directory / FOLDER)
        (directory / FOLDER).mkdir()

    def start(self) -> None:
        """Watch from now on."""
        self._file = os.open(self._folder / str(self._rank), os.O_RDWR | os.O_CREAT, 0o644)
        self._stacks.mkdir(exist_ok=True)
        self._out = open(self._stacks / f"rank_{self._rank:05d}.txt", "a", encoding="utf-8")  # noqa: SIM115  kept open
        position.step, position.finished = None, 0  # an earlier job in the same process left its values
        position.moved = self._write  # a process that is stopped has said where
        threading.Thread(target=self._serve, name="watch", daemon=True).start()
        _watches.append(self)

    def see_through(self, main_rank_is_through: Callable[[], bool]) -> None:
        """Watch on until the main rank is through as well: it has files to write when the others have none."""
        self._through = True
        while self._stays and not main_rank_is_through():
            time.sleep(self._turn_s / 10)

    def stop(self) -> None:
        """The end of this rank's part of the job."""
        self._done.set()
        position.moved = lambda: None
        with self._lock:
            faulthandler.cancel_dump_traceback_later()
        _watches.remove(self)
        self._out.close()

        # What is left is of a job that hung.
        if not os.path.getsize(self._out.name):
            os.unlink(self._out.name)
        with contextlib.suppress(OSError):  # of other ranks, or of an earlier job
            self._stacks.rmdir()

        os.close(self._file)
        with contextlib.suppress(OSError):
            (self._folder / str(self._rank)).unlink(missing_ok=True)
            self._folder.rmdir()

    def leave_to_others(self) -> None:
        """An error ends this process, which judges nobody any more; a hang on the way out is for the others to see."""
        self._judges = self._stays = False

    def end_late(self) -> None:
        """A collective of this rank has waited in vain: end the process with the line that names who is behind."""
        self._late = True  # it comes out of its wait, and is not the one who is waited for
        before = self._read()
        self._done.wait(3 * self._turn_s)
        places = self._read()
        silent = frozenset(r for r, p in places.items() if r in before and p.turns == before[r].turns)  # this one turns
        others, how = {r: p for r, p in places.items() if r != self._rank}, _STOPPED if silent else _SLOW
        self._end(self._line(places, behind(others, silent), how, self._late_s, "parallel.timeout_s"))

    def end_if_told(self) -> None:
        """End the process where the ranks have been told to end: an error that follows from that needs no line."""
        if self._told():
            self._end("")

    def _serve(self) -> None:
        observer, last = Observer(self._timeout_s), time.monotonic()
        while not self._done.wait(self._turn_s):
            # Time in which this process was stopped, as a whole job may be, is nobody's fault.
            now = time.monotonic()
            seconds, last = min(now - last, 2 * self._turn_s), now
            with self._lock:
                if self._done.is_set():
                    return
                self._write()
                # Where a library keeps the interpreter this thread stands too: faulthandler's own does not need it.
                # What a span may take besides is no matter: this thread turns meanwhile, and arms it anew.
                faulthandler.dump_traceback_later(self._timeout_s, file=self._out)

            if self._told():
                self._end("")
            if self._judges:
                places = self._read()
                if found := observer.look(places, seconds):
                    self._end(self._line(places, *found, "run.progress_timeout_s"))

    def _write(self) -> None:
        self._turns += 1
        p = position
        place = Place(self._turns, p.finished, p.passed, p.where(), p.limit_s(), self._waits())
        with contextlib.suppress(OSError):  # the disk may be away for a while
            os.pwrite(self._file, json.dumps(asdict(place)).encode()[:_BYTES].ljust(_BYTES), 0)

    def _waits(self) -> bool:
        if self._late or self._through:
            return True
        frame = sys._current_frames().get(self._thread)
        return frame is not None and any(part in frame.f_code.co_filename for part in _WAITING)

    def _read(self) -> dict[int, Place]:
        found = {}
        for rank in range(self._world):
            with contextlib.suppress(OSError, ValueError, TypeError):  # not there yet, or half written
                found[rank] = Place(**json.loads((self._folder / str(rank)).read_bytes()))
        return found

    def _told(self) -> bool:
        return (self._folder / _TOLD).exists()

    def _line(self, places: Mapping[int, Place], ranks: list[int], how: str, seconds: float, key: str) -> str:
        """What is said of the ranks that are behind."""
        names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else "no rank"
        where = " / ".join(dict.fromkeys(places[rank].where for rank in ranks if rank in places))
        others = ", and the others wait for it" if 0 < len(ranks) < self._world else ""
        return (
            f"{names} {how} for {seconds:.0f} s ({key}): {where}{others}; see the stacks of all threads in "
            f"{self._stacks}, mend what hangs or raise the limit, and start the same command again to go on"
        )

    def _end(self, line: str) -> None:
        """Say it, if nobody has, and end this process."""
        with contextlib.suppress(OSError):
            os.close(os.open(self._folder / _TOLD, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            if line:
                print(f"brorl: {line}", file=sys.stderr, flush=True)
        with self._lock:
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            with contextlib.suppress(OSError, ValueError):
                self._out.write(f"{when}, rank {self._rank}, process {os.getpid()}, {position.where()}\n")
                if sys.exc_info()[0]:
                    traceback.print_exc(file=self._out)  # where it waited in vain
                self._out.flush()
                faulthandler.dump_traceback(self._out)
                self._out.flush()
        # A launcher ends the others when the first one goes: they write theirs before.
        time.sleep(2 * self._turn_s if line else 0)
        os._exit(1)


_watches: list[Watch] = []  # of this process


def process_ends() -> None:
    """An error is about to end this process."""
    for watch in _watches:
        watch.leave_to_others()


def wait_failed(late: bool) -> None:
    """A collective of this process has failed: waited in vain (late), or lost its peer. Where the ranks are watched and
    one hangs this ends the process; else it returns."""
    for watch in _watches:
        if late:
            watch.end_late()
        watch.end_if_told()
