"""Run the command line on a model that is small enough for tests."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import forks
import metric_faults

REPOSITORY = Path(__file__).parents[2]
TOML = """
data = { train = ["TRAIN"], held_out = ["HELD_OUT"], template = "{prompt}=", verifier = "exact" }
rollout = { n = 32, prompts = 6, max_tokens = 6 }
reward = { workers = 1, extract = "full" }
algo.mini_batches = 2
optim.lr = 1e-3
train = { steps = 8, tokens_per_micro_batch = 600, checkpoint_every = 3 }
evaluate = { samples = 2, every = 4 }
sft = { steps = 60, examples_per_step = 64, lr = 3e-3 }
"""

# Words to reverse, and greatest common divisors. Only test_examples.py uses tasks of Reasoning Gym, since importing it
# takes each scoring process more than a second.
WORDS = [a + b + c + d for a in "bdgkmt" for b in "aeiou" for c in "lnrs" for d in ("", "y")]
ROWS = [
    *({"prompt": word, "answer": word[::-1]} for word in WORDS),
    *({"prompt": f"{a}, {b}", "answer": str(math.gcd(a, b))} for a in range(1, 10) for b in range(1, 10)),
]
HELD_OUT = ROWS[10::13]  # 24 rows
# A random model gets different rewards from this verifier.
LETTERS = "def letters(response, row):\n    return sum(c.isalpha() for c in response) / 6\n"


def write_config(folder: Path) -> Path:
    """Write TOML, its data files and LETTERS to a folder; return the path of the configuration."""
    data = {"HELD_OUT": HELD_OUT, "TRAIN": [row for row in ROWS if row not in HELD_OUT]}
    text = TOML
    for name, data_rows in data.items():
        path = folder / f"{name.lower()}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in data_rows))
        text = text.replace(name, str(path))
    (folder / "run.toml").write_text(text)
    (folder / "letters.py").write_text(LETTERS)
    return folder / "run.toml"


def reward_letters(config: Path) -> list[str]:
    """Return the settings of a run in which a random model learns, with the configuration of write_config."""
    verifier = f"data.verifier={config.parent / 'letters.py'}:letters"
    return [verifier, "reward.strict=false", "reward.cut_off_factor=1.0"]


SCRIPT = REPOSITORY / "examples" / "brorl_1.5b.sh"
# brorl_1.5b.sh computes in bf16, which is slow on CPUs without instructions for it.
SMALL_EXAMPLE = ["model.dtype=fp32", "rollout.dtype=fp32", "rollout.n=16", "rollout.prompts=6", "reward.workers=1"]
SMALL_EXAMPLE += ["data.held_out_prompts=4", "evaluate.samples=1"]
MAKE_MODEL = REPOSITORY / "tools" / "make_tiny_model.py"
SMALL_MODEL = ["--hidden", "32", "--layers", "2", "--heads", "2", "--kv-heads", "1", "--ffn", "64", "--context", "32"]


def make_model(config: Path | str, directory: Path | str, *options: str, cwd: Path | None = None) -> None:
    """Write a random model of a few thousand parameters, and a tokenizer for the data of the configuration."""
    result = forks.script(MAKE_MODEL, config, directory, *SMALL_MODEL, *options, cwd=cwd)
    assert result.returncode == 0, result.stderr


def example_script() -> Any:
    """Return the Python part of examples/brorl_1.5b.sh as a module."""
    spec = spec_from_loader("script", SourceFileLoader("script", str(SCRIPT)))
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "random"}


def brorl(
    *arguments: Any, cwd: Path | None = None, plots: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in forked ranks until it ends. plots: draw plots, which takes half of the time of a short run."""
    return forks.command_line([str(a) for a in arguments], {**ENVIRONMENT, **environment}, cwd, plots)


def train(
    config: Path, model: Path, run_dir: Path, *options: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `brorl train` on two processes, and check that it succeeds."""
    command = ["train", "--processes", 2, config, f"model.path={model}", f"run.dir={run_dir}"]
    result = brorl(*command, *options, **environment)
    assert result.returncode == 0, result.stderr
    return result


def rewind(run_dir: Path, step: int) -> None:
    """Leave a finished run as a kill after its checkpoint of this step would have left it."""
    latest = f"step_{step:08d}"
    (run_dir / "checkpoints" / "latest").write_text(f"{latest}\n")
    for path in (run_dir / "checkpoints").glob("step_*"):
        if path.name > latest:
            shutil.rmtree(path)
    shutil.rmtree(run_dir / "model")
    (run_dir / "summary.json").unlink()


def start(*arguments: Any, **environment: str) -> subprocess.Popen[str]:
    """Start a command as a user does, in a new process group. The command starts the ranks."""
    command = [sys.executable, "-m", "megatron_brorl", *map(str, arguments)]
    env = {**ENVIRONMENT, **environment}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True
    )


def lines_until(run: subprocess.Popen[str], text: str, seconds: float = 180.0) -> Iterator[str]:
    """Yield the output of a started run up to the line that contains `text`; fail if the run does not print it."""
    assert run.stdout
    lines = []
    timer = threading.Timer(seconds, os.killpg, (run.pid, signal.SIGKILL))
    timer.start()
    try:
        for line in run.stdout:
            lines.append(line)
            yield line
            if text in line:
                return
    finally:
        timer.cancel()
    raise AssertionError(f"the run did not print {text!r}:\n{''.join(lines)}")


def wait_for(run: subprocess.Popen[str], text: str) -> None:
    """Read the output of a started run up to the line that contains `text`."""
    for _line in lines_until(run, text):
        pass


def metric_lines(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without times; check that all metrics are documented."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [fault for line in lines for fault in metric_faults.of_row(line)] == []
    return [{k: v for k, v in line.items() if k != "time"} for line in lines]
