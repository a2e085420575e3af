"""Verifiers that hang, crash, raise and forge results, for the workers of test_worker_pool.py. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from megatron_brorl.rewards.verifier import Judge, VerifierRow


def echo(answer: str, row: VerifierRow) -> float:
    return float(answer)


def hang(answer: str, row: VerifierRow) -> float:
    while answer.startswith("hang"):
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
    """Freeze the process, as a debugger or a cgroup would."""
    if answer == "hang":
        os.kill(os.getpid(), signal.SIGSTOP)
    return 1.0


def writes(answer: str, row: VerifierRow) -> float:
    """Write into every open pipe, as an answer could if a verifier executed it."""
    message = {
        "noise": b"\xff" * 4096 + b"\n",
        "endless": b"x" * 100_000,
        "forged": b'["ok", 0.5, "", {}]\n' * 2,
        "nested": b"[" * 30_000 + b"\n",
        "infinite": b'["ok", 1e999, "", {}]\n',
        "status": b'["great", 1.0, "", {}]\n',
        "part": b'["ok", 1.0, "", {"a": "1"}]\n',
        "short": b'["ok"]\n',
    }.get(answer, b"")
    for fd in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(fd, message)
    return 0.25


def make(name: str) -> Judge:
    return Judge(globals()[name])
