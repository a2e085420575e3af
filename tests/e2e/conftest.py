from __future__ import annotations

from pathlib import Path

import pytest
from e2e.runs import brorl, make_model, write_config


@pytest.fixture(scope="session")
def config(tmp_path_factory) -> Path:
    return write_config(tmp_path_factory.mktemp("config"))


@pytest.fixture(scope="session")
def init(config) -> Path:
    """A random model and its tokenizer."""
    directory = config.parent / "init"
    make_model(config, directory)
    return directory


@pytest.fixture(scope="session")
def warm(config, init) -> Path:
    """Return the initial model after a little supervised training on two processes."""
    directory = config.parent / "sft"
    result = brorl("sft", "--processes", "2", config, f"model.path={init}", f"run.dir={directory}")
    assert result.returncode == 0, result.stderr
    return directory / "model"


@pytest.fixture(scope="session")
def finished(config, warm, tmp_path_factory):
    """An undisturbed run: its folder and its finished process."""
    directory = tmp_path_factory.mktemp("runs") / "undisturbed"
    result = brorl("train", "--processes", "2", config, f"model.path={warm}", f"run.dir={directory}", plots=True)
    assert result.returncode == 0, result.stderr
    return directory, result
