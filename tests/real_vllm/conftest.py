"""vLLM itself, on this machine's CPU: `make test-vllm` makes the environment that it runs in."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_engines import PYTHON, Model, make_engine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """An engine takes half a minute to start: tests that can share one come one after another."""
    here = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    for item in here:
        if not PYTHON.exists():
            item.add_marker(pytest.mark.skip(reason=f"there is no vLLM ({PYTHON}): make test-vllm installs it"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return Model(tmp_path_factory.mktemp("model"), "qwen2", tied=True)


@pytest.fixture(scope="module")
def shared(model, tmp_path_factory):
    """An engine with the model's weights, for tests that leave it as it was."""
    engine = make_engine(model, tmp_path_factory.mktemp("shared") / "log", PYTHON)
    engine.update_weights(model.stream(), 0)
    yield engine
    engine.close()


@pytest.fixture
def start(tmp_path):
    """Starts engines, and ends them after the test."""
    started = []

    def make(model, **kwargs):
        engine = make_engine(model, tmp_path / f"log_{len(started)}", PYTHON, **kwargs)
        started.append(engine)
        return engine

    yield make
    for engine in reversed(started):
        engine.close()
