from __future__ import annotations

from pathlib import Path

import forks
import pytest
from e2e.runs import brorl, write_config

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def config(tmp_path_factory) -> Path:
    return write_config(tmp_path_factory.mktemp("config"))


@pytest.fixture(scope="session")
def init(config) -> Path:
    """A random model of some thousand parameters and its tokenizer."""
    directory = config.parent / "init"
    options = ["--hidden", "32", "--layers", "2", "--heads", "2", "--kv-heads", "1", "--ffn", "64", "--context", "32"]
    done = forks.script(REPOSITORY / "tools" / "make_tiny_model.py", config, directory, *options)
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture(scope="session")
def warm(config, init) -> Path:
    """The same after a little supervised training on two processes."""
    directory = config.parent / "sft"
    done = brorl("sft", "--processes", "2", config, f"model.path={init}", f"run.dir={directory}")
    assert done.returncode == 0, done.stderr
    return directory / "model"
