#!/usr/bin/env python3
"""What a GPU has to show of this project, in half an hour: kernels, speed, engines, a step, weights between processes.

    python tools/gpu_check.py [STAGE ...] [--device cpu] [--out FILE] [--limit S] [--scratch DIR]
                              [--vllm-python PYTHON] [--trtllm-python PYTHON]
    python tools/gpu_check.py pack FILE.tar.gz [--wheels DIR]

Stages: kernels (built, tested, under compute-sanitizer), speed (against products, copies and others' code), engine (the
built-in one against transformers), step (shared prompts, offload, resume), ipc (weights by CUDA IPC), fp8 (Transformer
Engine's recipes), remote (TensorRT-LLM and vLLM); all of them by default. Each runs in a process of its own and
is ended after --limit seconds; what it had found by then is kept, and the next one goes on. Models and prompts are made
here, and no network is needed. What the machine lacks is a row "missing".

Rows are appended to --out, one JSON object a line, and the tables to the same name with .md. Exit code 1 where a row
failed. --device cpu: a dry run with tiny sizes on the CPU, which shows that this script works and nothing of a GPU.

pack: the checkout, without docs, and the wheels of a folder as an archive below 64 MiB.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from gpu_stages.launch import launch  # noqa: E402
from gpu_stages.pack import pack  # noqa: E402
from gpu_stages.report import heading, machine, table  # noqa: E402

from megatron_brorl.errors import UserError  # noqa: E402
from megatron_brorl.rollout.registry import ENGINES  # noqa: E402

STAGES = ("kernels", "speed", "engine", "step", "ipc", "fp8", "remote")
LIMIT_S = 480.0


def main() -> None:
    """Run what the command line asks for."""
    try:
        if sys.argv[1:2] == ["pack"]:
            _pack(sys.argv[2:])
        else:
            sys.exit(_check(_arguments(sys.argv[1:])))
    except UserError as e:
        print(f"gpu_check: {e}", file=sys.stderr)
        sys.exit(2)


def _arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run with tiny sizes")
    parser.add_argument(
        "--out", type=Path, default=Path("gpu_check.jsonl"), help="rows (%(default)s); tables beside it"
    )
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of a stage (%(default)s)")
    parser.add_argument("--scratch", type=Path, help="folder for models and logs; else one that is removed")
    for key, kind in ENGINES.items():
        needed = " and ".join((kind.package, *kind.needs))
        parser.add_argument(f"--{key}-python", help=f"interpreter of the environment that has {needed}")
    args = parser.parse_args(words)
    unknown = [name for name in args.stages if name not in STAGES]
    if unknown:
        raise UserError(f"{unknown[0]}: no such stage; there are {', '.join(STAGES)}, and pack")
    return args


def _pack(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="gpu_check.py pack", description="Write an archive of checkout and wheels.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--wheels", type=Path, help="folder of *.whl that go along")
    args = parser.parse_args(words)
    size = pack(ROOT, args.file, args.wheels)
    print(f"{args.file}: {size / 2**20:.1f} MiB")


def _check(args: argparse.Namespace) -> int:
    """Run the stages; the exit code."""
    if args.device == "cuda" and not _cuda():
        raise UserError("torch finds no CUDA device here; --device cpu makes a dry run")
    command = shlex.join(["python", "tools/gpu_check.py", *sys.argv[1:]])
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as own:
        scratch = (args.scratch or Path(own)).resolve()
        scratch.mkdir(parents=True, exist_ok=True)
        pythons = {key: word for key in ENGINES if (word := getattr(args, f"{key}_python"))}
        job = {"device": args.device, "scratch": str(scratch), "pythons": pythons}
        rows = run_stages(args.stages or STAGES, job, args.out, args.limit, command)
    return int(any(row["result"].startswith("failed") for row in rows))


def run_stages(
    stages: Sequence[str], job: dict[str, Any], out: Path, limit: float, command: str
) -> list[dict[str, Any]]:
    """All rows of all stages, which are written as each ends. job: fields of gpu_stages.common.Job."""
    # The head, before anything can go wrong.
    date, about = datetime.date.today().isoformat(), machine()
    _append(out.with_suffix(".md"), heading(about, date, command))
    _append(out, json.dumps({"stage": "machine", "date": date, "command": command, **about}) + "\n")
    print(heading(about, date, command), flush=True)

    scratch = Path(job["scratch"])
    told = scratch / "gpu_check_job.json"
    told.write_text(json.dumps(job), encoding="utf-8")
    every: list[dict[str, Any]] = []
    for stage in stages:
        written = scratch / f"{stage}.jsonl"
        written.unlink(missing_ok=True)
        words = [sys.executable, "-m", "gpu_stages.child", stage, str(told), str(written)]
        rows, seconds = launch(words, written, scratch / f"{stage}.log", limit, _environment())
        rows = [{"stage": stage, **row} for row in rows]

        # What is known is on the disk before the next stage.
        _append(out, "".join(json.dumps(row) + "\n" for row in rows))
        _append(out.with_suffix(".md"), "\n" + table(stage, rows, seconds))
        print(table(stage, rows, seconds), flush=True)
        every += rows
    return every


def _environment() -> dict[str, str]:
    """Of a stage's process: this checkout first, and no network."""
    folders = [str(ROOT / "tools"), str(ROOT / "benchmarks"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }


def _append(path: Path, text: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as e:
        raise UserError(f"--out {path}: cannot be written: {e.strerror}") from None


def _cuda() -> bool:
    look = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return not subprocess.run([sys.executable, "-c", look], capture_output=True).returncode


if __name__ == "__main__":
    main()
