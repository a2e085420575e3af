"""No tests: verifiers that misbehave in every way, for the workers of test_rewards_pool.py. Imports no torch."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any


def echo(answer: str, reference: str | None, metadata: Mapping[str, Any]) -> float:
    return float(answer)


def hang(answer: str, reference: str | None, metadata: Mapping[str, Any]) -> float:
    while answer == "hang":
        pass
    return 1.0


def hang_in_c(answer: str, reference: str | None, metadata: Mapping[str, Any]) -> float:
    return float(9 ** (9**9) > 0) if answer == "hang" else 1.0


def die(answer: str, reference: str | None, metadata: Mapping[str, Any]) -> float:
    if answer == "die":
        with Path(metadata["log"]).open("a") as log:
            log.write("died\n")
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def die_once(answer: str, reference: str | None, metadata: Mapping[str, Any]) -> float:
    try:
        Path(metadata["log"]).touch(exist_ok=False)
    except FileExistsError:
        return 1.0
    os._exit(3)


def log(answer: str, reference: str | None, metadata: Mapping[str, Any]) -> float:
    with Path(metadata["log"]).open("a") as file:
        file.write(f"{answer}\n")
    return 1.0


def returns(answer: str, reference: str | None, metadata: Mapping[str, Any]) -> Any:
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


def raises(answer: str, reference: str | None, metadata: Mapping[str, Any]) -> float:
    if answer == "exit":
        sys.exit(0)
    if answer == "recurse":
        return raises(answer, reference, metadata)
    if answer == "memory":
        return float(len(bytearray(1 << 40)))
    if answer == "fine":
        return 1.0
    raise ValueError("with \x1b[31m\nnewlines")


def prints(answer: str, reference: str | None, metadata: Mapping[str, Any]) -> float:
    print("x" * 100_000, flush=True)
    os.write(1, b"y" * 100)
    os.write(2, b"z" * 100)
    return 1.0


def light(answer: str, reference: str | None, metadata: Mapping[str, Any]) -> float:
    return float("torch" not in sys.modules and "numpy" not in sys.modules)


def hash_seed(answer: str, reference: str | None, metadata: Mapping[str, Any]) -> float:
    return (hash("a text") % 1000) / 1000


def nap(answer: str, reference: str | None, metadata: Mapping[str, Any]) -> float:
    time.sleep(0.3)
    return 1.0


def resolve(name: str) -> Callable[..., float]:
    verify: Callable[..., float] = globals()[name]
    return verify
