"""What a run holds on to: 500 steps in one process, and after each of them its memory, files, threads and disk.

    python tests/torture/leaks.py --steps 500

The run is tiny and has all that a long one has: evaluations, checkpoints of which two are kept, recorded rollouts, a
rollout log, TensorBoard, scoring processes; --engine: its rollouts come from an engine process (the contract double).
Resident memory may grow by 2% after the first fifth of the steps; nothing else may grow, but for the files that are the
run's record.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
from torture import kills, launching

RECORD = ("metrics.jsonl", "rollouts.jsonl", "rollouts", "tensorboard")  # what a run adds to with every step
SIZES = [
    "rollout.n=4", "rollout.prompts=2", "evaluate.every=5", "evaluate.samples=1", "evaluate.bootstrap=10",
    "train.checkpoint_every=5", "train.keep_checkpoints=2", "reward.workers=2", "reward.strict=false",
    "reward.cut_off_factor=1.0", "optim.lr=1e-5",
]  # fmt: skip
MOST = {  # that a figure may grow by: a share of it, or else nothing
    "trainer_mib": 0.02, "children_mib": 0.02,
    "disk_kib": 0.01,  # numbers get more digits
}  # fmt: skip


@dataclass(frozen=True)
class Held:
    """What a run holds after a step."""

    trainer_mib: float  # resident, without what is shared with others
    children_mib: float  # likewise, of all processes that it started
    children: int
    files: int  # open
    threads: int
    shared: int  # files in /dev/shm
    shared_mib: float
    disk_files: int  # in run.dir, without RECORD
    disk_kib: float


class Watch:
    """A callback that looks after every step."""

    def __init__(self, directory: Path, trace: int) -> None:
        self.directory, self.trace, self.seen = directory, trace, list[Held]()
        self.first: tracemalloc.Snapshot | None = None

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """See megatron_brorl.Callback."""
        gc.collect()
        self.seen.append(held(self.directory))
        if self.trace and step == self.trace:
            self.first = tracemalloc.take_snapshot()


def held(directory: Path) -> Held:
    """By this process and what it has started."""
    process = psutil.Process()
    children = launching.running()
    shared = [f for f in Path("/dev/shm").rglob("*") if f.is_file() and f.owner() and str(os.getpid()) in str(f)]
    own = [f for f in directory.rglob("*") if f.is_file() and f.relative_to(directory).parts[0] not in RECORD]
    return Held(
        trainer_mib=process.memory_full_info().uss / 2**20,
        children_mib=sum(p.memory_full_info().uss for p in children) / 2**20,
        children=len(children),
        files=process.num_fds(),
        threads=process.num_threads(),
        shared=len(shared),
        shared_mib=sum(f.stat().st_size for f in shared) / 2**20,
        disk_files=len(own),
        disk_kib=sum(f.stat().st_size for f in own) / 2**10,
    )


def growth(seen: list[Held]) -> dict[str, float]:
    """Of each figure, from the second fifth of the steps to the last: a share, by medians, or the rise of its peak."""
    fifth = len(seen) // 5
    early, late = [asdict(h) for h in seen[fifth : 2 * fifth]], [asdict(h) for h in seen[-fifth:]]
    found = {}
    for name in early[0]:
        before, after = [h[name] for h in early], [h[name] for h in late]
        if name in MOST:
            found[name] = statistics.median(after) / (statistics.median(before) or 1.0) - 1
        else:
            found[name] = max(after) - max(before)
    return found


def too_much(grown: Mapping[str, float]) -> list[str]:
    """Which figures have grown by more than they may."""
    return [name for name, by in grown.items() if by > MOST.get(name, 0)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--engine", action="store_true")
    parser.add_argument("--trace", type=int, default=0, help="say what Python has allocated since this step")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1"}
    if args.trace:
        tracemalloc.start(12)

    with tempfile.TemporaryDirectory(prefix="torture") as folder:
        root, began = Path(folder), time.monotonic()
        words = kills.arena(root, engine=args.engine).words
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(kills.DOUBLE)]))
        watch = Watch(root / "run", args.trace)
        run(words, root / "run", args.steps, watch)
        report(watch.seen)
        if watch.first:
            for line in tracemalloc.take_snapshot().compare_to(watch.first, "lineno")[:25]:
                print(line)
        print(f"{len(watch.seen)} steps, {(time.monotonic() - began) / 60:.1f} minutes")
        grown = growth(watch.seen)
    print(", ".join(f"{name} {by:+.2%}" if name in MOST else f"{name} {by:+g}" for name, by in grown.items()))
    print("too much:", too_much(grown) or "nothing")
    return 1 if too_much(grown) else 0


def run(words: list[str], directory: Path, steps: int, watch: Watch) -> None:
    """In this process."""
    import megatron_brorl

    config, *overrides = words
    kept = [o for o in overrides if o.partition("=")[0] not in {s.partition("=")[0] for s in SIZES} | {"run.log"}]
    megatron_brorl.train(
        config, overrides=[*kept, *SIZES, f"train.steps={steps}", f"run.dir={directory}"], callbacks=[watch]
    )


def report(seen: list[Held]) -> None:
    """A line for every tenth of the steps."""
    print("step", *asdict(seen[0]))
    for step in range(0, len(seen), max(1, len(seen) // 10)):
        print(step, *(f"{value:.6g}" for value in asdict(seen[step]).values()))
    print(len(seen) - 1, *(f"{value:.6g}" for value in asdict(seen[-1]).values()))


if __name__ == "__main__":
    sys.exit(main())
