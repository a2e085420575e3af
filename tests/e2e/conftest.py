from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from e2e.runs import ENVIRONMENT, TOML, brorl

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def config(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("config") / "run.toml"
    path.write_text(TOML)
    return path


@pytest.fixture(scope="session")
def init(config) -> Path:
    """A random model of some thousand parameters and its tokenizer."""
    directory = config.parent / "init"
    options = ["--hidden", "32", "--layers", "2", "--heads", "2", "--kv-heads", "1", "--ffn", "64", "--context", "32"]
    tool = [sys.executable, str(REPOSITORY / "tools" / "make_tiny_model.py"), str(config), str(directory), *options]
    subprocess.run(tool, check=True, capture_output=True, timeout=120, env=ENVIRONMENT)
    return directory


@pytest.fixture(scope="session")
def warm(config, init) -> Path:
    """The same after a little supervised training on two processes."""
    directory = config.parent / "sft"
    done = brorl("sft", "--processes", "2", config, f"model.path={init}", f"run.dir={directory}")
    assert done.returncode == 0, done.stderr
    return directory / "model"
