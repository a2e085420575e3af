"""Tests of tools/gpu_check.py: failing stages, the comparison with the baseline, and all stages in the dry mode."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import forks
import gpu_check
import gpu_stages
import pytest

ROOT = Path(__file__).parents[2]
FINE = """rows.write('{"what": "b", "result": "ok", "speed": 12345.6}\\n')"""


def test_a_failed_stage_does_not_stop_the_others(tmp_path, monkeypatch):
    write = """rows.write('{"what": "a", "result": "ok"}\\n{"what": '); rows.flush()"""  # a row and half of another
    child = "import subprocess; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True)"
    programs = {
        "raises": f"{write}\nraise ValueError('a planted fault')",
        "hangs": f"{child}\ntime.sleep(600)",
        "dies": "os.abort()",
        "fine": FINE,
    }
    original = gpu_check.launch

    def launch(command, rows, log, limit):
        program = f"import os, sys, time; rows = open(sys.argv[1], 'a')\n{programs[command[2]]}"  # command[2]: stage
        return original([sys.executable, "-S", "-c", program, str(rows)], rows, log, limit)

    monkeypatch.setattr(gpu_check, "launch", launch)
    job = {"device": "cpu", "scratch": str(tmp_path), "pythons": {}}
    limits = dict.fromkeys(programs, 2.0)
    rows = gpu_check.run_stages(limits, job, (tmp_path / "out.jsonl").open("a"), total=60.0)
    results = {row["stage"]: row["result"] for row in rows if row["what"] == gpu_check.WHOLE_STAGE}
    assert results["raises"] == "failed: exit code 1: ValueError: a planted fault"
    assert results["hangs"].startswith("failed: killed after 2 s")
    assert results["dies"].startswith("failed: exit code -6")
    assert next(row["result"] for row in rows if row["stage"] == "raises") == "ok"  # An earlier row is kept.
    assert rows[-1] == {"stage": "fine", "what": "b", "result": "ok", "speed": 12345.6}

    # The file has the rows too. The child of the stage that hung, whose log has its id, is dead or a zombie.
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == rows
    stat = Path("/proc", (tmp_path / "hangs.log").read_text().strip(), "stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"

    (late,) = gpu_check.run_stages({"fine": 2.0}, job, (tmp_path / "out.jsonl").open("a"), total=0.0)
    assert late["result"].startswith("failed: not started")


def test_other_weights_of_a_resumed_run_fail(tmp_path, monkeypatch):
    def run(what, *_):
        (tmp_path / "run" / "model").mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / "model" / "model.safetensors").write_text(what)
        return gpu_stages.judged(what, wrong="", s=1.0)

    monkeypatch.setattr(gpu_stages, "_step_job", lambda *_, **__: ({}, tmp_path))
    monkeypatch.setattr(gpu_stages, "_run", run)
    results = [row["result"] for row in gpu_stages.resume(gpu_stages.Job("cpu", scratch=str(tmp_path), pythons={}))]
    assert results == ["ok", "ok", "failed: the weights differ from those of the undisturbed run"]


CHANGES = [  # changed metrics of a row, and the regressions that are reported
    ({"ms": 2.0 * 1.09, "MiB": 101.0, "tokens/s": 920.0, "gap": 9.0}, []),  # gap has no tolerance
    ({"ms": 0.5, "MiB": 10.0, "tokens/s": 1e6}, []),
    ({"ms": 2.22, "MiB": 103.0}, ["a: ms is 2.22, and 2 in the baseline", "a: MiB is 103, and 100 in the baseline"]),
    ({"tokens/s": 900.0}, ["a: tokens/s is 900, and 1,000 in the baseline"]),
    ({"ms": float("nan")}, ["a: ms is nan, and 2 in the baseline"]),
    ({"sha256": "b"}, ["a: sha256 is b, and a in the baseline"]),
    ({"result": "failed: a fault", "ms": 9.0}, ["s, a: failed: a fault"]),
    ({"result": "missing: a package"}, []),
]


@pytest.mark.parametrize(("changes", "expected"), CHANGES)
def test_regressions_of_the_same_gpu_end_the_command(changes, expected, tmp_path, monkeypatch):
    row = {"stage": "s", "what": "a", "result": "ok", "ms": 2.0, "MiB": 100.0, "tokens/s": 1000.0, "sha256": "a"}
    monkeypatch.setattr(gpu_check, "BASELINE", tmp_path / "baseline.json")
    monkeypatch.setattr(gpu_check, "machine", lambda: {"GPU": "NVIDIA X, 80 GiB", "commit": "c"})
    (tmp_path / "baseline.json").write_text('{"NVIDIA Y": {"a: ms": 0.1}}')

    def run(row, *options):
        monkeypatch.setattr(gpu_check, "run_stages", lambda *_: [row])
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(tmp_path / "out.jsonl"), *options])
        with pytest.raises(SystemExit) as end:
            gpu_check.main()
        return (end.value.code or "").splitlines()

    assert run(row, "--update") == []
    assert run({**row, **changes}) == expected
    assert json.loads((tmp_path / "baseline.json").read_text())["NVIDIA Y"] == {"a: ms": 0.1}


# One stage of each kind except `step`, because `resume` runs steps too, and `lost_rank`, because e2e/test_resume.py
# kills and stops ranks too. `quickstart` uses the model of another stage.
DRY = ("engine_135m", "loss_1.5b", "tokens", "resume", "update_shared", "update_te_shared", "profile_135m", "trl")
DRY += ("vllm", "trtllm_tp2", "nccl", "quickstart")


@pytest.mark.slow
def test_stages_run_in_the_dry_mode(tmp_path, monkeypatch):
    """Run stages on a CPU, with the fakes of tests/contract in place of TensorRT-LLM.

    Stages run in this process and fork their training runs. `update` and `profile` set up Megatron in a new process.
    """
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "contract" / "double"))
    monkeypatch.setenv("MODEL", str(tmp_path / "t4"))  # another stage writes it
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    launch = gpu_check.launch

    def launch_here(command, *arguments):
        if command[2].startswith(("update", "profile")):
            return launch(command, *arguments)
        import bench_common

        def run(words, environment):
            return forks.command_line(words[3:], environment, plots=False), 0.0

        monkeypatch.setattr(bench_common, "run", run)
        return list(gpu_stages.STAGES[command[2]][0](gpu_stages.Job(**json.loads(Path(command[3]).read_text()))))

    monkeypatch.setattr(gpu_check, "launch", launch_here)
    limits = dict.fromkeys(DRY, 600.0)
    job = {"device": "cpu", "scratch": str(tmp_path), "pythons": {}}
    rows = gpu_check.run_stages(limits, job, sys.stdout, total=3600.0)
    assert {row["stage"] for row in rows} == limits.keys()
    assert [row for row in rows if row["result"].startswith("failed")] == []
    absent = {row["stage"] for row in rows if row["result"].startswith("missing")}
    assert absent <= {"update_te_shared", "trl", "vllm"}
    kinds = {name.partition("_")[0] for name in gpu_stages.STAGES}
    assert kinds - {name.partition("_")[0] for name in DRY} == {"step", "lost"}
