#!/usr/bin/env python3
"""Programs per second in sandboxes before and after many hostile ones, and that these get, leave and write nothing.

    python benchmarks/bench_sandbox.py [--quick] [--json FILE] [--programs N] [--timeout S] [--workers N]

Three rounds through as many processes as there are workers: N programs that add two numbers; N attacks of
sandbox_attacks.py in turn, each with a seed of its own and S seconds; N that add again. Every attack must score 0 with
a reason; afterwards no process of the benchmark may live, and no file may have come or changed beside the secret.
Exit status 1 where one does not hold, or the third round has less than 80% of the first one's throughput.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import sandbox_attacks

from megatron_brorl.rewards import code
from megatron_brorl.rewards.sandbox import probe
from megatron_brorl.rewards.sandbox.limits import Limits
from megatron_brorl.rewards.sandbox.run import Sandbox
from megatron_brorl.rewards.verifier import VerifierRow

ADD = "a, b = map(int, input().split())\nprint(a + b)"
LEAST = 0.8
_SUBREAPER = 36  # <linux/prctl.h>


def row(number: int) -> VerifierRow:
    """The task of adding, with an answer that nobody guesses."""
    tests = [{"input": f"{number} 4711", "output": str(number + 4711)}]
    return {"id": str(number), "prompt": "", "answer": None, "metadata": {"tests": tests}}


def judge(args: tuple[str, int, float, float]) -> tuple[float, str]:
    """Reward and reason of a program. args: it, its number, the seconds for all of its tests and for one."""
    program, number, seconds, test_seconds = args
    found = code.score(program, row(number), Sandbox(True, Limits(seconds, test_seconds)))
    return found.reward, found.reason


def processes() -> set[int]:
    """Those that this process has started, whoever started them for it."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text(encoding="utf-8").rpartition(")")[2].split()[1])
        except OSError:
            continue
    mine = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in mine} - mine:
        mine |= more
    return mine - {os.getpid()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="100 programs a round")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--programs", type=int, help="a round; 1000")
    parser.add_argument("--timeout", type=float, default=0.5, help="seconds of a hostile program")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    args = parser.parse_args()
    if problem := probe.problem():
        print(f"bench_sandbox: {problem}", file=sys.stderr)
        return 1
    count = args.programs or (100 if args.quick else 1000)

    # Three rounds in the same workers, as in a run of days.
    names = sorted(sandbox_attacks.ALL)
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)  # whatever is orphaned below comes to this process
    resource_tracker.ensure_running()  # multiprocessing's own, which stays
    before = processes()
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder, "secret")
        secret.write_text("a secret", encoding="utf-8")
        attacks = [
            (sandbox_attacks.program(names[i % len(names)], i, str(secret)), i, 2 * args.timeout, args.timeout)
            for i in range(count)
        ]
        benign = [(ADD, i, 20.0, 20.0) for i in range(count)]
        rounds: list[tuple[float, list[tuple[float, str]]]] = []
        with concurrent.futures.ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(judge, benign[: 4 * args.workers]))  # imports
            for programs in (benign, attacks, benign):
                start = time.perf_counter()
                found = list(pool.map(judge, programs))
                rounds.append((time.perf_counter() - start, found))
        untouched = secret.read_text(encoding="utf-8") == "a secret" and os.listdir(folder) == ["secret"]

    # What went wrong, by name.
    paid = Counter(names[i % len(names)] for i, (reward, why) in enumerate(rounds[1][1]) if reward or not why)
    unpaid = sum(reward != 1 for i in (0, 2) for reward, _ in rounds[i][1])
    left = processes() - before
    figures: dict[str, Any] = {
        "programs": count,
        "workers": args.workers,
        "timeout": args.timeout,
        "attacks": len(names),
        "per_second": [round(count / seconds, 1) for seconds, _ in rounds],
        "after_over_before": round(rounds[0][0] / rounds[2][0], 3),
        "hostile_paid": dict(paid),
        "benign_unpaid": unpaid,
        "processes_left": len(left),
        "untouched": untouched,
    }
    for name, figure in figures.items():
        print(f"{name:20} {figure}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    good = not paid and not unpaid and not left and untouched and figures["after_over_before"] >= LEAST
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
