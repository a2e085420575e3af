"""Running the command line as a user does, on a model small enough for a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import forks

TOML = """
[data]
held_out_prompts = 24
template = "{prompt}="
[[data.tasks]]
name = "spell_backward"
prompt_regex = '-> nus\\): (.+)'
config = { min_word_len = 3, max_word_len = 4 }
[[data.tasks]]
name = "gcd"
prompt_regex = 'numbers: (.+)\\. Give'
config = { min_numbers = 2, max_numbers = 2, min_value = 1, max_value = 9 }
[rollout]
n = 32
prompts = 6
max_tokens = 6
[reward]
workers = 1
extract = "full"
[algo]
mini_batches = 2
[optim]
lr = 1e-3
[train]
steps = 8
tokens_per_micro_batch = 600
checkpoint_every = 3
[evaluate]
samples = 2
every = 4
bootstrap = 100
[sft]
steps = 60
examples_per_step = 64
lr = 3e-3
"""

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "random"}


def brorl(*arguments: Any, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """One command to its end, in forked ranks."""
    return forks.command_line([str(a) for a in arguments], {**ENVIRONMENT, **environment}, cwd)


def by_launcher(*arguments: Any) -> subprocess.CompletedProcess[str]:
    """The same as a user starts it: in a fresh process, which starts the ranks."""
    command = [sys.executable, "-m", "megatron_brorl", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)


def start(*arguments: Any, **environment: str) -> subprocess.Popen[str]:
    """The same again, left running in a process group of its own."""
    command = [sys.executable, "-m", "megatron_brorl", *map(str, arguments)]
    env = {**ENVIRONMENT, **environment}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True
    )


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without their wall-clock values."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "time"} for line in lines]
