#!/usr/bin/env python3
"""Check this project on a GPU, in short stages that run one by one: build, kernels, training, engines, FP8.

    python tools/gpu_check.py [STAGE ...] [--device cpu] [--out FILE] [--limit SECONDS] [--scratch DIR]
                              [--vllm-python PYTHON] [--trtllm-python PYTHON]

Every stage runs in its own process and is killed after --limit seconds. Its rows are kept, and the next stage starts.
Models and prompts are generated, so no network is needed. tools/gpu_check.txt lists the Python packages. A part that
the machine lacks is a row "missing".

Rows are appended to --out, one JSON object per line, and tables to the same name with .md. The exit code is 1 if a row
failed. --device cpu runs all stages with tiny sizes, which tests this script, not a GPU.
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
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent
STAGES = ("build", "ops", "train", "n512", "fp8", "vllm", "trtllm")
LIMIT_S = 480.0
PACKAGES = ("torch", "triton", "megatron-core", "transformers", "transformer-engine", "vllm", "tensorrt_llm")
WHOLE = "the stage as a whole"
Row = dict[str, Any]  # "what", "result" ("ok", "failed: ...", "missing: ...") and metrics


def main() -> None:
    """Run the stages named on the command line."""
    args = _arguments(sys.argv[1:])
    command = shlex.join(["python", "tools/gpu_check.py", *sys.argv[1:]])
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as own:
        scratch = (args.scratch or Path(own)).resolve()
        scratch.mkdir(parents=True, exist_ok=True)
        pythons = {key: getattr(args, f"{key}_python") for key in ("vllm", "trtllm")}
        job = {"device": args.device, "scratch": str(scratch), "pythons": pythons}
        rows = run_stages(args.stages or STAGES, job, args.out, args.limit, command)
    sys.exit(any(row["result"].startswith("failed") for row in rows))


def _arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run with tiny sizes")
    parser.add_argument(
        "--out", type=Path, default=Path("gpu_check.jsonl"), help="rows; tables go to the same name .md"
    )
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of a stage (%(default)s)")
    parser.add_argument("--scratch", type=Path, help="folder for models and logs; by default one that is removed")
    parser.add_argument("--vllm-python", default=sys.executable, help="interpreter of the environment with vLLM")
    parser.add_argument("--trtllm-python", default=sys.executable, help="interpreter of the one with TensorRT-LLM")
    args = parser.parse_args(words)
    for name in args.stages:
        if name not in STAGES:
            parser.error(f"{name}: there is no such stage; the stages are {', '.join(STAGES)}")
    return args


def run_stages(stages: Sequence[str], job: dict[str, Any], out: Path, limit: float, command: str) -> list[Row]:
    """Run the stages, write the rows of each as it ends, and return all rows. job: fields of gpu_stages.Job."""
    date = datetime.date.today().isoformat()
    about = machine()
    head = "; ".join(f"{key}: {value}" for key, value in about.items())
    _write(
        out, [{"stage": "machine", "date": date, "command": command, **about}], f"## GPU check, {date}\n\n{head}\n\n"
    )

    scratch = Path(job["scratch"])
    (scratch / "job.json").write_text(json.dumps(job), encoding="utf-8")
    every: list[Row] = []
    for stage in stages:
        written = scratch / f"{stage}.jsonl"
        written.unlink(missing_ok=True)
        words = [sys.executable, str(TOOLS / "gpu_stages.py"), stage, str(scratch / "job.json"), str(written)]
        begun = time.monotonic()
        rows = [{"stage": stage, **row} for row in launch(words, written, scratch / f"{stage}.log", limit)]
        _write(out, rows, table(stage, rows, time.monotonic() - begun))
        every += rows
    return every


def _write(out: Path, rows: Sequence[Row], text: str) -> None:
    with out.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    with out.with_suffix(".md").open("a", encoding="utf-8") as file:
        file.write(text + "\n")
    print(text, flush=True)


def launch(command: Sequence[str], rows: Path, log: Path, limit: float) -> list[Row]:
    """Return the rows that a command wrote to `rows`, and another one if it failed.

    Its output goes to `log`. After `limit` seconds it is killed with all processes that it started.
    """
    folders = [str(ROOT), str(TOOLS), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders)), "HF_HUB_OFFLINE": "1"}
    late = False
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
            late = True
        finally:
            # The next stage needs the memory of the device, so no child may survive.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    # The last line may be cut off.
    found: list[Row] = []
    for line in rows.read_text(encoding="utf-8").splitlines() if rows.is_file() else []:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    if late:
        found.append({"what": WHOLE, "result": f"failed: killed after {limit:g} s; its output: {log}"})
    elif process.returncode:
        lines = [x for x in log.read_text(encoding="utf-8", errors="replace").splitlines() if x.strip()]
        said = lines[-1].strip()[:300] if lines else "no output"
        found.append({"what": WHOLE, "result": f"failed: exit code {process.returncode}: {said}"})
    return found


def machine() -> dict[str, str]:
    """Return the GPU with its driver, the processor, Python, and the versions of packages."""
    found = {"GPU": "missing", "processor": f"{os.cpu_count()} cores", "Python": platform.python_version()}
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        found["GPU"] = subprocess.run(query, capture_output=True, text=True).stdout.strip() or "missing"
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def table(stage: str, rows: Sequence[Row], seconds: float) -> str:
    """Return the rows of a stage as a table in Markdown."""
    lines = [f"### {stage}, {seconds:.0f} s", "", "| what | result | metrics |", "|---|---|---|"]
    for row in rows:
        metrics = {key: value for key, value in row.items() if key not in ("what", "result", "stage")}
        text = ", ".join(f"{key} {_number(value)}" for key, value in metrics.items())
        cells = (" ".join(x.replace("|", "\\|").split()) for x in (row["what"], row["result"], text))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"


if __name__ == "__main__":
    main()
