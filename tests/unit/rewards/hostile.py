"""No tests: verifiers that misbehave in every way, for the workers of test_pool.py. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

from megatron_brorl.rewards.protocol import OK, Record, pack
from megatron_brorl.rewards.verifier import Score, VerifierRow


def echo(answer: str, row: VerifierRow) -> float:
    return float(answer)


def hang(answer: str, row: VerifierRow) -> float:
    while answer == "hang":
        pass
    return 1.0


def hang_in_c(answer: str, row: VerifierRow) -> float:
    return float(9 ** (9**9) > 0) if answer == "hang" else 1.0


def die(answer: str, row: VerifierRow) -> float:
    if answer == "die":
        with Path(row["metadata"]["log"]).open("a") as log:
            log.write("died\n")
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def die_once(answer: str, row: VerifierRow) -> float:
    try:
        Path(row["metadata"]["log"]).touch(exist_ok=False)
    except FileExistsError:
        return 1.0
    os._exit(3)


def log(answer: str, row: VerifierRow) -> float:
    with Path(row["metadata"]["log"]).open("a") as file:
        file.write(f"{answer}\n")
    return 1.0


def returns(answer: str, row: VerifierRow) -> Any:
    values = {
        "nan": float("nan"),
        "inf": float("inf"),
        "none": None,
        "string": "1",
        "list": [1.0],
        "negative": -0.001,
        "above": 1.001,
        "complex": 1j,
        "true": True,
        "int": 1,
        "half": Fraction(1, 2),
    }
    return values[answer]


def raises(answer: str, row: VerifierRow) -> float:
    if answer == "exit":
        sys.exit(0)
    if answer == "recurse":
        return raises(answer, row)
    if answer == "memory":
        return float(len(bytearray(1 << 40)))
    if answer == "fine":
        return 1.0
    raise ValueError("with \x1b[31m\nnewlines")


def prints(answer: str, row: VerifierRow) -> float:
    print("x" * 100_000, flush=True)
    os.write(1, b"y" * 100)
    os.write(2, b"z" * 100)
    return 1.0


def light(answer: str, row: VerifierRow) -> float:
    return float("torch" not in sys.modules and "numpy" not in sys.modules)


def hash_seed(answer: str, row: VerifierRow) -> float:
    return (hash("a text") % 1000) / 1000


def nap(answer: str, row: VerifierRow) -> float:
    time.sleep(0.3)
    return 1.0


def stop(answer: str, row: VerifierRow) -> float:
    """Frozen, as by a debugger or a cgroup."""
    if answer == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    return 1.0


def forge(answer: str, row: VerifierRow) -> float:
    """Verdicts that nobody asked for, into every pipe that is open."""
    if answer == "forge":
        for fd in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(fd, pack(Record(OK, 0.5)) * 3)
    return 1.0


def wait_for(answer: str, row: VerifierRow) -> float:
    """Until there is a file of that name."""
    while not Path(row["metadata"]["file"]).exists():
        time.sleep(0.01)
    return 1.0


def resolve(name: str) -> Callable[..., float]:
    verify: Callable[..., float] = globals()[name]
    return verify


def writes_verdicts(answer: str, row: VerifierRow) -> float:
    """Into every pipe that is open, as a hostile answer would once it runs here."""
    if answer == "attack":
        for fd in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(fd, b"\xff" * 4096)
    return 0.5


def explains(answer: str, row: VerifierRow) -> Score:
    return Score(0.25, f"{answer} for {row['prompt']}", {"a": 0.5, "b": 0.0})
