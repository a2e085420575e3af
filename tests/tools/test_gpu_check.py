"""Tests of tools/gpu_check.py: failing stages, and all stages in the dry mode."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import forks
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import gpu_check  # noqa: E402
import gpu_stages  # noqa: E402

FINE = """rows.write('{"what": "b", "result": "ok", "speed": 12345.6}\\n')"""


def test_a_failed_stage_does_not_stop_the_others(tmp_path, monkeypatch):
    row = """rows.write('{"what": "a", "result": "ok"}\\n{"what": '); rows.flush()"""
    child = "import subprocess; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True)"
    programs = {
        "raises": f"{row}\nraise ValueError('a planted fault')",
        "hangs": f"{child}\ntime.sleep(600)",
        "dies": "os.abort()",
        "fine": FINE,
    }
    original = gpu_check.launch

    def launch(command, rows, log, limit):
        program = f"import os, sys, time; rows = open(sys.argv[1], 'a')\n{programs[command[2]]}"
        return original([sys.executable, "-S", "-c", program, str(rows)], rows, log, limit)

    monkeypatch.setattr(gpu_check, "launch", launch)
    job = {"device": "cpu", "scratch": str(tmp_path), "pythons": {}}
    found = gpu_check.run_stages(list(programs), job, tmp_path / "out.jsonl", 2.0, "a command")
    results = {row["stage"]: row["result"] for row in found if row["what"] == gpu_check.WHOLE}
    assert results["raises"] == "failed: exit code 1: ValueError: a planted fault"
    assert results["hangs"].startswith("failed: killed after 2 s")
    assert results["dies"].startswith("failed: exit code -6")
    assert next(row["result"] for row in found if row["stage"] == "raises") == "ok"  # An earlier row is kept.
    assert found[-1] == {"stage": "fine", "what": "b", "result": "ok", "speed": 12345.6}
    assert "| b | ok | speed 12,346 |" in (tmp_path / "out.md").read_text()

    # The file has the rows too, after one about the machine. No child of the stage that hung is alive.
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert written[0]["command"] == "a command"
    assert written[1:] == found
    state = Path("/proc", (tmp_path / "hangs.log").read_text().strip(), "stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.slow
def test_every_stage_runs_in_the_dry_mode(tmp_path, monkeypatch):
    """Run all stages on a CPU, with the fakes of tests/contract in place of TensorRT-LLM.

    Stages with long imports run in this process, and fork their training runs.
    """
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "contract" / "double"))
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    start, launch = subprocess.run, gpu_check.launch

    def run(command, **options):
        if command[1:3] == ["-m", "megatron_brorl"]:
            return forks.command_line(command[3:], dict(os.environ), plots=False)
        return start(command, **options)

    def here(command, *arguments):
        if command[2] in ("build", "vllm"):
            return launch(command, *arguments)
        told = json.loads(Path(command[3]).read_text())
        return list(gpu_stages.STAGES[command[2]](gpu_stages.Job(**told)))

    monkeypatch.setattr(gpu_stages, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(gpu_check, "launch", here)
    job = {"device": "cpu", "scratch": str(tmp_path), "pythons": {}}
    rows = gpu_check.run_stages(gpu_check.STAGES, job, tmp_path / "out.jsonl", 300.0, "a command")
    assert [row for row in rows if row["result"].startswith("failed")] == []
    passed = {row["what"] for row in rows if row["result"] == "ok"}
    assert passed >= {"tests", "linear_ppo_loss fp32", "gae", "value_loss", "two steps", "resume for a third step"}
    assert passed >= {"N = 16", "trtllm"}
