"""tools/gpu_check.py: bounds against sums by hand, stages that fail beside ones that do not, every stage dry."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "benchmarks")]

import gpu_check  # noqa: E402
from gpu_stages import fp8, launch, pack, report, roofline, step  # noqa: E402

from megatron_brorl.errors import UserError  # noqa: E402
from megatron_brorl.model_shape import parse_shape  # noqa: E402

# Two layers: hidden 8, 4 heads of 2, 2 of keys, MLP 16, vocabulary 10, tied.
SIZES = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "vocab_size": 10,
}


def test_decoding_reads_what_a_count_step_by_step_says():
    shape, prompt, n, tokens = parse_shape(SIZES, "here"), 5, 3, 4
    matrices = 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16) + 10 * 8
    of_token = 2 * 2 * 2 * 2  # keys and values, layers, heads, their size
    total = sum(2 * matrices + 2 * of_token * (prompt + n * before) for before in range(tokens))
    assert roofline.decode_bytes(shape, 2, prompt, n, tokens) == total
    h200, h100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
    assert roofline.decode_share(shape, 2, (prompt, n, tokens), 1e-6, h200) == pytest.approx(total / 4.8e12 / 1e-6)
    assert roofline.decode_share(shape, 2, (prompt, n, tokens), 1e-6, h100) == pytest.approx(total / 3.35e12 / 1e-6)
    assert roofline.decode_share(shape, 2, (prompt, n, tokens), 1.0, "CPU") is None


def test_utilisation_is_of_the_peak():
    assert roofline.mfu(989.4e12, 4.0, "NVIDIA H200") == pytest.approx(0.25)
    assert roofline.mfu(1.0, 1.0, "CPU") is None


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs stages, each of which is a line of Python that has `rows`, the path to write to."""

    def stages(limit: float, **programs: str) -> tuple[list[dict[str, str]], list[str]]:
        def planted(command, rows, *rest):
            program = f"import os, sys, time; rows = open(sys.argv[1], 'a')\n{programs[command[3]]}"
            return launch.launch([sys.executable, "-S", "-c", program, str(rows)], rows, *rest)

        monkeypatch.setattr(gpu_check, "launch", planted)
        job = {"device": "cpu", "scratch": str(tmp_path), "pythons": {}}
        found = gpu_check.run_stages(list(programs), job, tmp_path / "out.jsonl", limit, "a command")
        return found, (tmp_path / "out.md").read_text().splitlines()

    return stages


FINE = """rows.write('{"what": "b", "result": "ok", "speed": 12345.6}\\n')"""


def test_a_stage_that_fails_hangs_or_dies_stops_no_other(run, tmp_path):
    row = """rows.write('{"what": "a", "result": "ok"}\\n{"what": '); rows.flush()"""
    child = "import subprocess; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True)"
    found, lines = run(
        2.0,
        raises=f"{row}\nraise ValueError('a planted fault')",
        hangs=f"{child}\ntime.sleep(600)",
        dies="os.abort()",
        fine=FINE,
    )
    results = {row["stage"]: row["result"] for row in found if row["what"] == launch.WHOLE}
    assert results["raises"] == "failed: exit code 1: ValueError: a planted fault"
    assert results["hangs"].startswith("failed: ran past 2 s")
    assert results["dies"].startswith("failed: signal SIGABRT")
    assert next(row["result"] for row in found if row["stage"] == "raises") == "ok"  # what came before is kept
    assert found[-1] == {"stage": "fine", "what": "b", "result": "ok", "speed": 12345.6}
    assert lines[-1] == "| b | ok | speed 12,346 |"

    # The rows are in the file too, after the machine's; and nothing of the one that hung is left.
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert written[0]["command"] == "a command"
    assert written[1:] == found
    pid = (tmp_path / "hangs.log").read_text().strip()
    state = Path("/proc", pid, "stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_table_takes_any_text():
    row = {"what": "a|b", "result": "failed: two\nlines", "n": 1234567, "share": 0.123456, "flag": True}
    assert report.table("s", [row], 1.0).splitlines()[-1] == (
        r"| a\|b | failed: two lines | n 1,234,567, share 0.1235, flag True |"
    )


def test_steps_are_compared():
    found = {"loss": 0.5, "grad norm": 2.0, "skipped": 0.0, "seconds": 1.0}
    assert step.compared(found, found, 0.03) == ""
    assert "gradient norm is 2.1" in step.compared({**found, "grad norm": 2.1}, found, 0.03)
    assert "loss is 0.51" in step.compared({**found, "loss": 0.51}, found, 0.03)
    assert "skipped" in step.compared({**found, "skipped": 1.0}, found, 0.03)
    assert fp8.against_bf16("x", {**found, "grad norm": 2.1, "seconds": 0.5}, found)["speed over bf16"] == 2.0
    assert fp8.against_bf16("x", {**found, "grad norm": 4.0}, found)["result"].startswith("failed: its gradient norm")
    assert fp8.against_bf16("x", found, {})["result"].startswith("failed: there is no bf16")


@pytest.fixture
def checkout(tmp_path):
    root = tmp_path / "checkout"
    (root / "docs").mkdir(parents=True)
    for name in ("a.py", "docs/page.md", "new.py", "ignored.so"):
        (root / name).write_text(name)
    (root / ".gitignore").write_text("*.so\n")
    subprocess.run(["git", "init", "-q", root], check=True)
    subprocess.run(["git", "-C", root, "add", "a.py", "docs", ".gitignore"], check=True)
    return root


def test_what_is_packed(checkout, tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with pytest.raises(UserError, match=r"has no \*\.whl"):
        pack.pack(checkout, tmp_path / "x.tar.gz", wheels)
    (wheels / "some-1.whl").write_bytes(b"wheel")
    target = tmp_path / "x.tar.gz"
    assert pack.pack(checkout, target, wheels) == target.stat().st_size
    with tarfile.open(target) as archive:
        names = set(archive.getnames())
        assert archive.extractfile("megatron-brorl/new.py").read() == b"new.py"
    assert names == {f"megatron-brorl/{x}" for x in ("a.py", "new.py", ".gitignore", "wheels/some-1.whl")}


def test_an_archive_above_the_limit_is_refused(checkout, tmp_path, monkeypatch, capsys):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "big-1.whl").write_bytes(bytes(i * i % 251 for i in range(2000)) * 2000)
    monkeypatch.setattr(pack, "LIMIT_MIB", 1 / 2**10)
    monkeypatch.setattr(gpu_check, "ROOT", checkout)
    target = tmp_path / "x.tar.gz"
    target.write_text("an older one")
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "pack", str(target), "--wheels", str(wheels)])
    with pytest.raises(SystemExit) as end:
        gpu_check.main()
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "above" in line
    assert "big-1.whl (4 MiB)" in line
    assert target.read_text() == "an older one"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkout", "wheels", "x.tar.gz"]


# What of each stage runs on a CPU, and what is missing there in any case.
DRY = {
    "kernels": {"tests of the ops on cpu"},
    "speed": {"three torch.mm", "linear_ppo_loss forward and backward, fused"},
    "engine": {"log-probabilities against transformers", "rollouts, brorl", "rollouts, transformers"},
    "step": {"step, one copy of the prompt", "step, one copy of the prompt, offload", "resume"},
    "ipc": {"weights by shared host memory, as they are", "weights by shared host memory, one of them spoiled"},
    "fp8": set(),
    "remote": set(),
}
LACKING = {"fp8": {"step, bf16", "step, FP8 blockwise"}, "remote": {"TensorRT-LLM", "vLLM"}}


@pytest.mark.slow
@pytest.mark.parametrize("stage", DRY)
def test_every_stage_runs_dry(stage, tmp_path):
    job = {"device": "cpu", "scratch": str(tmp_path), "pythons": {}}
    rows = gpu_check.run_stages([stage], job, tmp_path / "out.jsonl", 300.0, "a command")
    assert [row for row in rows if row["result"].startswith("failed")] == []
    by_result = {kind: {r["what"] for r in rows if r["result"].startswith(kind)} for kind in ("ok", "missing")}
    assert by_result["ok"] >= DRY[stage]
    assert by_result["missing"] >= LACKING.get(stage, set())
    figures = {row["what"]: row for row in rows}
    if stage == "kernels":
        assert figures["tests of the ops on cpu"]["passed"] > 100
    if stage == "step":  # offload moves memory, and changes no bit of a step
        shared, moved = (figures[f"step, one copy of the prompt{x}"] for x in ("", ", offload"))
        assert (moved["loss"], moved["grad norm"]) == (shared["loss"], shared["grad norm"])
        assert figures["resume"]["weights"] == "the same bits"


@pytest.mark.slow
def test_the_remote_stage_on_doubles(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "contract" / "double"))
    job = {"device": "cpu", "scratch": str(tmp_path), "pythons": {}}
    rows = gpu_check.run_stages(["remote"], job, tmp_path / "out.jsonl", 300.0, "a command")
    found = {row["what"]: row for row in rows}
    names = ("start", "refit", "log-probabilities against transformers", "sleep and wake", "rollouts")
    assert {name: found[f"TensorRT-LLM: {name}"]["result"] for name in names} == dict.fromkeys(names, "ok")
    assert found["TensorRT-LLM: sleep and wake"]["tokens"] == "the same"
