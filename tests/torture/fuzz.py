"""Fuzzing of what the program reads: every spoiled input is accepted or refused in one line, within seconds.

    python tests/torture/fuzz.py --configs 20000 --files 10000 --seed 1

Prints counts per target and every failure with the number that repeats it (`--only TARGET:NUMBER`); exits with 1 where
there was one.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).parents[1]))

from torture.configs import config_target
from torture.files import file_targets

from megatron_brorl.errors import UserError

SECONDS = 10.0  # a case that takes longer hangs
LONGEST = 2_000  # characters of a message

# A target spoils an input in `folder` by the generator, and returns what is to be run on it.
Target = Callable[[Path, random.Random], Callable[[], object]]


class Hang(BaseException):
    """Not an Exception, so that nothing that catches those takes it for a refusal."""


def judge(exercise: Callable[[], object]) -> tuple[str, str]:
    """("accepted" | "refused" | what went wrong, its details)."""
    try:
        with _limit(), contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            exercise()
    except UserError as e:
        text = str(e)
        if "\n" in text or "\r" in text:
            return "several lines", text
        return ("refused", text) if len(text) <= LONGEST else ("a message without end", text[:500])
    except Hang:
        return "hang", traceback.format_exc()
    except BaseException:
        return "traceback", traceback.format_exc()
    return "accepted", ""


@contextlib.contextmanager
def _limit() -> Iterator[None]:
    def ring(_: int, frame: FrameType | None) -> None:
        raise Hang(f"more than {SECONDS} s")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def fuzz(
    name: str, target: Target, numbers: range | list[int], seed: int
) -> tuple[collections.Counter[str], list[str]]:
    """How the cases of a target ended, by outcome, and the failures in full."""
    counts: collections.Counter[str] = collections.Counter()
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HOME"] = folder  # nothing of the user's is read or written
        for number in numbers:
            exercise = target(Path(folder), random.Random(f"{seed}/{name}/{number}"))
            outcome, details = judge(exercise)
            counts[outcome] += 1
            if outcome not in ("accepted", "refused"):
                failures.append(f"{name}:{number} (seed {seed}): {outcome}\n{details}")
    return counts, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=int, default=20_000)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--only", help="TARGET or TARGET:NUMBER")
    parser.add_argument("--most", type=int, default=5, help="failures of a target that are printed")
    args = parser.parse_args()

    # How often each target's turn comes.
    targets: dict[str, Target] = {"config": config_target, **file_targets()}
    each = -(-args.files // (len(targets) - 1))
    numbers: dict[str, range | list[int]] = {n: range(args.configs if n == "config" else each) for n in targets}
    if args.only:
        chosen, _, number = args.only.partition(":")
        numbers = {chosen: [int(number)] if number else numbers[chosen]}

    # One line per target, then what went wrong.
    wrong = 0
    print(f"seed {args.seed}")
    for name, which in numbers.items():
        began = time.monotonic()
        counts, failures = fuzz(name, targets[name], which, args.seed)
        told = ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items()))
        print(f"{name}: {len(which)} cases: {told} ({time.monotonic() - began:.0f} s)", flush=True)
        print(*failures[: args.most], sep="\n", end="\n" if failures else "", flush=True)
        wrong += len(failures)
    print(f"{wrong} failures")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
