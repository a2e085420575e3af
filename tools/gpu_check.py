#!/usr/bin/env python3
"""Measure this project on a GPU, in short stages that run one by one, and compare with benchmarks/gpu_baseline.json.

    python tools/gpu_check.py [STAGE ...] [--device cpu] [--out FILE] [--total SECONDS] [--scratch DIR] [--update]
                              [--vllm-python PYTHON] [--trtllm-python PYTHON] [--trl-python PYTHON]

Every stage runs in its own process and is killed after its limit. Its rows are kept, and the next stage starts. No
network is needed. tools/gpu_check.txt lists the Python packages. A part that the machine lacks is a row "missing".

Rows are appended to --out, one JSON object per line, after one about the machine. The last lines name rows that failed
and metrics that are worse than in the section of this GPU (TOLERANCE). The exit code is then 1. --device cpu runs the
stages with tiny sizes, which tests this script, not a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from gpu_stages import STAGES

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent
BASELINE = ROOT / "benchmarks" / "gpu_baseline.json"
# Whether (value, baseline) is acceptable, by the last word of a metric's name
TOLERANCE: dict[str, Callable[[Any, Any], bool]] = {
    **dict.fromkeys(("s", "ms", "products", "launches"), lambda value, baseline: value <= 1.1 * baseline),
    **dict.fromkeys(("tokens/s", "GB/s", "times"), lambda value, baseline: 1.1 * value >= baseline),
    "MiB": lambda value, baseline: value <= 1.02 * baseline,
    "sha256": lambda value, baseline: value == baseline,
}
PACKAGES = ("torch", "triton", "megatron-core", "transformers", "transformer-engine", "vllm", "tensorrt_llm")
WHOLE_STAGE = "the stage as a whole"
Row = dict[str, Any]  # "what", "result" ("ok", "failed: ...", "missing: ...") and metrics


def main() -> None:
    """Run the stages named on the command line, and compare their rows with the baseline."""
    args = _arguments(sys.argv[1:])
    command = shlex.join(["python", "tools/gpu_check.py", *sys.argv[1:]])
    about = machine() | {"date": datetime.date.today().isoformat(), "command": command}
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as temporary, args.out.open("a", encoding="utf-8") as out:
        print(json.dumps({"stage": "machine", **about}), file=out, flush=True)
        scratch = (args.scratch or Path(temporary)).resolve()
        scratch.mkdir(parents=True, exist_ok=True)
        pythons = {key: getattr(args, f"{key}_python") for key in ("vllm", "trtllm", "trl")}
        job = {"device": args.device, "scratch": str(scratch), "pythons": pythons}
        limits = {name: STAGES[name][1] for name in args.stages}
        rows = run_stages(limits, job, out, args.total)

    baselines = json.loads(BASELINE.read_text(encoding="utf-8"))
    gpu = about["GPU"].partition(",")[0]
    lines = regressions(rows, baselines.get(gpu, {}))
    if gpu not in baselines:
        print(f"{BASELINE.name} has no section for this GPU ({gpu}); --update writes it")
    if args.update:
        baselines[gpu] = baselines.get(gpu, {}) | {key: about[key] for key in ("date", "commit")} | measured(rows)
        BASELINE.write_text(json.dumps(baselines, indent=1) + "\n", encoding="utf-8")
    sys.exit("\n".join(lines) or None)


def _arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = f"{', '.join(STAGES)}; by default all without TensorRT-LLM"
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=stages)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run with tiny sizes")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.jsonl"), help="file that the rows are appended to")
    parser.add_argument("--total", type=float, default=480.0, help="seconds of all stages (%(default)s)")
    parser.add_argument("--scratch", type=Path, help="folder for models and logs; by default one that is removed")
    parser.add_argument("--update", action="store_true", help="write the results into the baseline of this GPU")
    for key, package in (("vllm", "vLLM"), ("trtllm", "TensorRT-LLM"), ("trl", "TRL")):
        parser.add_argument(f"--{key}-python", default=sys.executable, help=f"interpreter with {package}")
    args = parser.parse_args(words)
    args.stages = args.stages or [name for name in STAGES if not name.startswith("trtllm")]
    for name in args.stages:
        if name not in STAGES:
            parser.error(f"{name}: there is no such stage; the stages are {', '.join(STAGES)}")
    return args


def run_stages(limits: Mapping[str, float], job: dict[str, Any], out: TextIO, total: float) -> list[Row]:
    """Run the stages, write the rows of each stage to `out` when it ends, and return all rows.

    limits: seconds of each stage. total: of all of them. job: fields of gpu_stages.Job.
    """
    scratch = Path(job["scratch"])
    (scratch / "job.json").write_text(json.dumps(job), encoding="utf-8")
    rows: list[Row] = []
    end = time.monotonic() + total
    for stage, limit in limits.items():
        seconds_left = min(limit, end - time.monotonic())
        written = scratch / f"{stage}.jsonl"
        written.unlink(missing_ok=True)
        command = [sys.executable, str(TOOLS / "gpu_stages.py"), stage, str(scratch / "job.json"), str(written)]
        results = [{"what": WHOLE_STAGE, "result": f"failed: not started within {total:g} s"}]
        if seconds_left > 0:
            results = launch(command, written, scratch / f"{stage}.log", seconds_left)
        stage_rows = [{"stage": stage, **row} for row in results]
        rows += stage_rows
        print(*map(json.dumps, stage_rows), sep="\n", file=out, flush=True)
        print(*map(line, stage_rows), sep="\n", flush=True)
    return rows


def launch(command: Sequence[str], written: Path, log: Path, limit: float) -> list[Row]:
    """Return the rows that a command wrote to the file `written`, and another one if the command failed.

    Its output goes to `log`. After `limit` seconds the command is killed with all processes that it started.
    """
    folders = [str(ROOT), str(TOOLS), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders)), "HF_HUB_OFFLINE": "1"}
    timed_out = False
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            # The next stage needs the memory of the device, so no child may survive.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    rows: list[Row] = []
    for text in written.read_text(encoding="utf-8").splitlines() if written.is_file() else []:
        with contextlib.suppress(ValueError):  # The last line may be cut off.
            rows.append(json.loads(text))
    if timed_out:
        rows.append({"what": WHOLE_STAGE, "result": f"failed: killed after {limit:g} s; its output: {log}"})
    elif process.returncode:
        lines = [x for x in log.read_text(encoding="utf-8", errors="replace").splitlines() if x.strip()]
        last_line = lines[-1].strip()[:300] if lines else "no output"
        rows.append({"what": WHOLE_STAGE, "result": f"failed: exit code {process.returncode}: {last_line}"})
    return rows


def machine() -> dict[str, str]:
    """Return the commit, the GPU with its driver, the processor, Python, and the versions of packages."""
    facts = dict.fromkeys(("GPU", "commit"), "missing")
    facts |= {"processor": f"{os.cpu_count()} cores", "Python": platform.python_version()}
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        facts["GPU"] = subprocess.run(query, capture_output=True, text=True).stdout.strip() or "missing"
    if shutil.which("git"):
        git = ["git", "rev-parse", "--short=8", "HEAD"]
        facts["commit"] = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "missing"
    for package in PACKAGES:
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = "missing"
    return facts


def measured(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the metrics of successful rows that are compared with the baseline, by "row: metric"."""
    return {
        f"{row['what']}: {metric}": value
        for row in rows
        for metric, value in row.items()
        if row["result"] == "ok" and metric.split()[-1] in TOLERANCE
    }


def regressions(rows: Sequence[Row], baseline: dict[str, Any]) -> list[str]:
    """Return a line for every row that failed, and for every metric that is worse than in the section of this GPU."""
    lines = [f"{row['stage']}, {row['what']}: {row['result']}" for row in rows if row["result"].startswith("failed")]
    for name, value in measured(rows).items():
        before = baseline.get(name, value)
        if not TOLERANCE[name.split()[-1]](value, before):
            lines.append(f"{name} is {_number(value)}, and {_number(before)} in the baseline")
    return lines


def line(row: Row) -> str:
    """Return a row as a line of text."""
    metrics = {key: value for key, value in row.items() if key not in ("what", "result", "stage")}
    texts = [row["result"], *(f"{key} {_number(value)}" for key, value in metrics.items())]
    return f"{row['stage']:<17}{row['what']}: {', '.join(texts)}"


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"


if __name__ == "__main__":
    main()
