"""Ctrl-C ends each command with one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("imported", "command"),
    [("pydantic", "metrics"), ("matplotlib", "report"), ("torch", "generate"), ("torch", "train")],
)
def test_ctrl_c_prints_one_line(tmp_path: Path, imported: str, command: str) -> None:
    """The command waits in the import of a module, which reads a named pipe."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / f"{imported}.py").write_text(f"open({str(pipe)!r}).read()")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "time": {}}\n')
    (tmp_path / "run.json").write_text('{"config": {"run": {"dir": "x"}}}')
    (tmp_path / "rows.jsonl").write_text('{"prompt": "7 - 2", "answer": "5"}\n')
    (tmp_path / "run.toml").write_text('[model]\npath = "m"\n[data]\ntrain = ["rows.jsonl"]\n')
    words = {"report": ["."], "generate": [".", "7 - 2"], "train": ["run.toml", "run.dir=out"]}.get(command, [])
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_brorl", command, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        stderr=subprocess.PIPE,
        text=True,
    )
    with pipe.open("w"):  # waits for the import
        process.send_signal(signal.SIGINT)
        lines = process.communicate(timeout=60)[1].split("\n")
    assert [line for line in lines if line][:1] == [line for line in lines if "brorl: " in line], lines
    assert process.returncode == (75 if command == "train" else -signal.SIGINT)
