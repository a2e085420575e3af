"""Tests of `brorl train --dry-run`: its checks and errors, and that it changes no file."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import forks
import pytest
import tiny
import torch
from command_line import output
from e2e.runs import ENVIRONMENT
from safetensors.torch import load_file, save_file
from unit.data.test_call_formats import READABLE, UNREADABLE
from unit.data.test_tokenizers import CHAT, make_hf

from megatron_brorl import train
from megatron_brorl.cli import main, run_folder
from megatron_brorl.config.load import load
from megatron_brorl.families.shape import read_shape
from megatron_brorl.rollout.native import pages

NAMES = ["tokenizer", "data", "ranks", "run.dir", "disk", "inputs", "checkpoint", "engine", "reward"]
NAMES += ["micro-step", "dry"]
TOML = """
run = { dir = "run", log = [] }
model.path = "model"
data.train = ["rows.jsonl"]
rollout = { n = 8, prompts = 2, max_tokens = 4 }
reward.workers = 1
algo.dynamic_sampling = false # an optimizer that never stepped has no moments
train = { steps = 1, tokens_per_micro_batch = 256 }
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with model, data and configuration of a run."""
    monkeypatch.chdir(tmp_path)
    sizes = {"vocab_size": 304, "bos_token_id": 0, "eos_token_id": 1, "num_hidden_layers": 2}
    tiny.make_model(tmp_path / "model", "qwen2", True, **sizes)
    make_hf(tmp_path / "model", chat_template=CHAT)
    rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(3) for b in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.toml").write_text(TOML)
    return tmp_path


def state(folder: Path) -> dict[str, str]:
    """Return hash and modification time of every file and folder."""
    paths = sorted(p for p in folder.rglob("*") if "__pycache__" not in p.parts)
    hashes = {p: hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else "" for p in paths}
    return {str(p.relative_to(folder)): f"{text} {p.stat().st_mtime_ns}" for p, text in hashes.items()}


def dry_run(capfd, *overrides: str, contains: str = "") -> tuple[int, list[str], str]:
    """Return the exit code, the names of the checks that passed, and stderr. contains: a part of stdout."""
    before = state(Path())
    with pytest.raises(SystemExit) as end:
        main.main(["train", "run.toml", "--dry-run", *overrides])
    assert state(Path()) == before
    out, err = capfd.readouterr()
    assert contains in out
    return int(end.value.code or 0), [x.split()[1] for x in out.splitlines() if x.startswith("  ok")], err


@pytest.fixture(autouse=True)
def no_signal_handlers(monkeypatch):
    monkeypatch.setattr(main.signals, "install", lambda **_: None)


def test_an_existing_checkpoint_is_checked_and_not_changed(folder, capfd):
    assert dry_run(capfd) == (0, NAMES, "")
    train("run.toml")
    capfd.readouterr()

    # 12 bytes per parameter, as Megatron writes them; 16 with a reference in bf16.
    parameters = sum(t.numel() for t in tiny.weights("model").values())
    assert run_folder.checkpoint_bytes(load("run.toml"), read_shape("model")) == 12 * parameters
    size = sum(p.stat().st_size for p in (folder / "run" / "checkpoints").glob("step_*/*.distcp"))
    assert 12 * parameters <= size < 1.5 * 12 * parameters
    with_reference = load("run.toml", ["algo.kl_coef=0.1", "model.dtype=bf16"])
    assert run_folder.checkpoint_bytes(with_reference, read_shape("model")) == (2 + 12 + 2) * parameters

    assert dry_run(capfd, "train.steps=2") == (0, NAMES, "")
    changes = "changed since that checkpoint: optim.lr = 1e-06 -> 0.001, train.steps = 1 -> 2"
    assert dry_run(capfd, "train.steps=2", "optim.lr=1e-3", contains=changes) == (0, NAMES, "")
    assert dry_run(capfd)[:2] == (0, [])  # the run has finished
    code, names, err = dry_run(capfd, "train.steps=2", "run.seed=1")
    assert (code, names[-1]) == (2, "inputs")
    assert "was written with run.seed = 0, now 1: set it back" in err
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "1 + 1 =", "answer": "2"}) + "\n")
    code, _, err = dry_run(capfd, "train.steps=2")
    assert code == 2
    assert "was written with other rows of data.train" in err


def not_finite(folder: Path) -> None:
    weights = load_file(folder / "model" / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] = torch.nan
    save_file(weights, folder / "model" / "model.safetensors", {"format": "pt"})


def raising(folder: Path) -> None:
    (folder / "own.py").write_text("def score(answer, row):\n    return float(row['answer'] == nothing)\n")


def calls_of(name: str) -> Callable[[Path], object]:
    """Return a function that gives the model the chat template of a name."""
    return lambda folder: make_hf(folder / "model", chat_template=(READABLE | UNREADABLE)[name])


CALCULATOR = ["environment.factory=megatron_brorl.environments.calculator:Calculator", "data.chat=true"]


@pytest.mark.parametrize(("name", "call_format"), [("json", "json"), ("xml", "hermes")])
def test_the_format_of_tool_calls_is_that_of_the_template(folder, capfd, name, call_format):
    calls_of(name)(folder)
    assert (
        dry_run(capfd, *CALCULATOR, contains=f"tools calculate, calls in format {call_format}")[1][1] == "environment"
    )


def old_engine(folder: Path) -> None:
    """Create an interpreter that reports an old engine."""
    python = folder / "python"
    python.write_text('#!/bin/sh\necho \'[{"vllm": true}, "0.31.2"]\'\n')
    python.chmod(0o755)


def no_tokenizer(folder: Path) -> None:
    (folder / "model" / "tokenizer.json").unlink()


RAISING = ["data.verifier=own.py:score"]
VLLM = ["rollout.engine=vllm", "engine.python=./python"]


@pytest.mark.parametrize(
    ("fault", "overrides", "last", "parts"),
    [
        (no_tokenizer, [], "", ["tokenizer.json"]),
        (lambda _: None, ["parallel.tensor=2"], "data", ["parallel.tensor"]),
        (not_finite, [], "reward", ["not finite"]),
        (raising, RAISING, "engine", ["'own.py:score'", "row rows.jsonl:1: broken: NameError"]),
        (old_engine, VLLM, "checkpoint", ["engine.python = ./python: vLLM 0.31.2", "install 0.32 or newer"]),
        (calls_of("mistral"), CALCULATOR, "tokenizer", ['writes a tool call as "[TOOL_CALLS] [{']),
    ],
    ids=["tokenizer", "layout", "weights", "verifier", "old engine", "call format"],
)
def test_the_first_problem_is_reported_in_one_line(folder, capfd, fault, overrides, last, parts):
    fault(folder)
    code, names, err = dry_run(capfd, *overrides)
    (line,) = [line for line in err.splitlines() if line.startswith("brorl: ")]
    assert (code, names[-1:]) == (2, [last] if last else [])
    assert all(part in line for part in parts), line


def test_too_little_disk_or_memory_is_refused_before_the_run(folder, capfd, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=1 << 19)
    with monkeypatch.context() as patched:
        patched.setattr(run_folder, "shutil", SimpleNamespace(disk_usage=lambda _: usage))
        for options in (["--dry-run"], []):
            assert "lower train.keep_checkpoints" in output(capfd, "train", "run.toml", *options, code=2)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=1 << 20, available=0))
    for options in (["--dry-run"], []):
        assert "of host memory while training" in output(capfd, "train", "run.toml", *options, code=2)
    assert not list((folder / "run").glob("*.json*"))


@pytest.mark.slow
def test_dry_run_with_two_ranks(folder, capfd):
    before = state(folder)
    config = str(folder / "run.toml")
    result = forks.command_line(["train", "--processes", "2", config, "--dry-run"], ENVIRONMENT, folder)
    assert (result.returncode, "brorl: " in result.stderr) == (0, False), result.stderr
    assert [x.split()[1] for x in result.stdout.splitlines() if x.startswith("  ok")] == NAMES
    assert "2: 2 copies of the model" in result.stdout
    assert state(folder) == before


OWN = """class Words:
    def reset(self, row): {reset}
    def step(self, text): {step}; return "", True
    def reward(self): {reward}; return 0.5
def score(response, row): {score}; return 0.5
"""


@pytest.mark.parametrize(
    ("name", "code", "status", "words"),
    [
        ("score", "1 / len(response)", 0, "warning|own.py:score|an empty text|ZeroDivisionError|(own.py, line 5)"),
        ("step", "assert text", 0, "warning|own.py:Words|an empty text|Words.step: AssertionError (own.py, line 3)"),
        *((name, "1 / 0", 2, f"Words.{name}: ZeroDivisionError") for name in ("reset", "step", "reward")),
    ],
)  # fmt: skip
def test_an_own_reward_or_environment_is_tried_on_texts(folder, capfd, name, code, status, words):
    parts = dict.fromkeys(("reset", "step", "reward", "score"), "0") | {name: code}
    (folder / "own.py").write_text(OWN.format(**parts))
    key = "data.verifier=own.py:score" if name == "score" else "environment.factory=own.py:Words"
    exit_code, _, err = dry_run(capfd, key, "reward.correct_at=0")
    assert (exit_code, err.count("\n")) == (status, 1)
    assert all(word in err for word in words.split("|")), err


@pytest.mark.parametrize(
    ("kind", "names", "ulimit", "total", "free", "reason"),
    [
        ("", ("max", "current"), -1, 200, 120, "{0}/a/memory.max"),
        ("memory", ("limit_in_bytes", "usage_in_bytes"), -1, 200, 120, "{0}/memory/a/memory.limit_in_bytes"),
        ("", ("max", "current"), 3122 << 20, 150, 50, f"ulimit -v {3122 * 1024}"),
    ],
)
def test_a_memory_limit_is_part_of_the_plan(folder, capfd, monkeypatch, kind, names, ulimit, total, free, reason):
    """The parent cgroup is limited to 200 MiB, and uses 90, 10 of them for cached files. This process has 3,072."""
    process = SimpleNamespace(vms=3072 << 20, rss=100 << 20)
    for name, value in {
        "resource.getrlimit": (ulimit,),
        "psutil.Process": SimpleNamespace(memory_info=lambda: process),
    }.items():
        monkeypatch.setattr(name, lambda *_, value=value: value)
    monkeypatch.setattr(pages, "PROCESS", folder)
    monkeypatch.setattr(pages, "CGROUPS", folder / "sys")
    (folder / "cgroup").write_text(f"1:cpu:/\n0:{kind}:/a/b\n")
    (folder / "sys" / kind / "a").mkdir(parents=True)
    for name, value in zip((*names, "stat"), (200 << 20, 90 << 20, f"inactive_file {10 << 20}"), strict=True):
        (folder / "sys" / kind / "a" / f"memory.{name}").write_text(str(value))
    reason = reason.format(folder / "sys")
    assert pages.host_memory(1) == (total << 20, free << 20, reason)
    code, _, err = dry_run(capfd)
    assert (code, f"GiB ({reason})" in err) == (2, True), err
