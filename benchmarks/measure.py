"""Time and memory of a call, measured in a separate process. Imports only the standard library and torch.

An engine is a script that reads a job, a JSON file, and prints its answer as the last line of standard output. It may
run in a different environment from this project, so the scripts import only this file and their engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

with contextlib.suppress(ImportError):  # the environment of llama.cpp may lack torch
    import torch

# (prompt, a length for each sibling, seed) -> the new tokens of each sibling
Generate = Callable[[list[int], list[int], int], Sequence[Sequence[int]]]
SYNCS = 5  # measured weight syncs, of which the median is reported


def status_kib(key: str) -> int:
    """Return a value of /proc/self/status in KiB, such as VmRSS or VmHWM."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(f"{key}:")).split()[1])


def forget_peak(device: str = "cpu") -> float:
    """Reset the peak of the device's memory. Return the MiB in use: torch's tensors on a GPU, else the resident set."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**20
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # sets VmHWM to VmRSS
    return status_kib("VmRSS") / 1024


def peak_mib(device: str = "cpu") -> float:
    """Return the peak of the device's memory in MiB: torch's tensors on a GPU, else the resident set."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return status_kib("VmHWM") / 1024


def timed(call: Callable[[], Any], device: str = "cpu") -> tuple[float, float, Any]:
    """Return (seconds, MiB by which the memory in use grew at its peak, result) of call()."""
    used = forget_peak(device)
    wait(device)
    start = time.perf_counter()
    result = call()
    wait(device)
    return time.perf_counter() - start, peak_mib(device) - used, result


def wait(device: str) -> None:
    """Wait until the device has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def read_job() -> dict[str, Any]:
    """Return the job of this script."""
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    return job


def answer(**values: Any) -> None:
    """Print the answer for the calling process."""
    print(json.dumps(values), flush=True)


def time_rollouts(job: dict[str, Any], generate: Generate, warm_tokens: int | None = None) -> dict[str, Any]:
    """Return the seconds of each timed call, and the peak of memory over all of them, weights included (peak_mib).

    Every call has a different prompt, so that no engine finds it in a cache. The first call, which may be limited to
    warm_tokens per sibling, only warms up. Raises an error if an engine returned other lengths than requested.
    """
    device = job.get("device", "cpu")
    forget_peak(device)
    seconds = []
    for i, prompt in enumerate(job["prompts"]):
        lengths = job["lengths"]
        if not i and warm_tokens:
            lengths = [min(n, warm_tokens) for n in lengths]
        start = time.perf_counter()
        rows = generate(prompt, lengths, i)
        elapsed = time.perf_counter() - start
        if [len(row) for row in rows] != lengths:
            raise RuntimeError("the engine returned other lengths than those asked for")
        if len(rows) > 1 and len({tuple(row) for row in rows}) == 1:
            raise RuntimeError("all siblings are the same: the engine did not sample")
        if i:
            seconds.append(elapsed)
    return {"seconds": seconds, "peak_mib": peak_mib(device)}


class EngineFailed(Exception):
    """Raised if an engine's process ended without an answer; the text has the last lines of stderr."""


def run(command: Sequence[str], environment: dict[str, str]) -> tuple[subprocess.CompletedProcess[str], float]:
    """Return a finished process, and the share of the machine's processors that others used during the run.

    Measurements are reliable if that share is near 0."""
    busy = _busy_seconds()
    children = _children_seconds()
    start = time.perf_counter()
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    others = _busy_seconds() - busy - (_children_seconds() - children)
    return process, max(0.0, others / (time.perf_counter() - start) / (os.cpu_count() or 1))


def _busy_seconds() -> float:
    """Return the processor seconds that the machine has spent in total, those stolen by its host included."""
    user, nice, system, _idle, _wait, irq, softirq, steal = (
        int(x) for x in Path("/proc/stat").read_text(encoding="ascii").split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def ask(python: str, script: str, job: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Run `script` of this folder under the interpreter `python`, in a fresh process with job["threads"] threads."""
    path = directory / "job.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    environment = os.environ | {
        "OMP_NUM_THREADS": str(job["threads"]),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",  # its threads would come on top of the requested ones
        "TRANSFORMERS_VERBOSITY": "error",
    }
    if python != sys.executable:
        environment.pop("PYTHONPATH", None)  # another environment has its own packages
    command = [python, str(Path(__file__).parent / script), str(path)]
    process, others = run(command, environment)
    if process.returncode or not process.stdout.strip():
        raise EngineFailed(f"{script} under {python} failed:\n" + "\n".join(process.stderr.strip().splitlines()[-15:]))
    result: dict[str, Any] = json.loads(process.stdout.strip().splitlines()[-1])
    return result | {"others_cpu_share": others}
