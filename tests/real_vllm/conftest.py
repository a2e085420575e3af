"""Fixtures for the real vLLM on this machine's CPU, in the environment that `make test-vllm` creates."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_engines import PYTHON, Model, make_engine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip these tests if vLLM is not installed."""
    here = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    for item in here:
        if not PYTHON.exists():
            item.add_marker(pytest.mark.skip(reason=f"vLLM is not installed ({PYTHON}): run make test-vllm"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return Model(tmp_path_factory.mktemp("model"), "qwen2", tied=True)


@pytest.fixture(scope="module")
def shared(model, tmp_path_factory):
    """An engine with the model's weights, for tests that do not change it. Starting one takes half a minute."""
    engine = make_engine(model, tmp_path_factory.mktemp("shared") / "log")
    engine.update_weights(model.stream(), version=0)
    yield engine
    engine.close()


@pytest.fixture
def start(tmp_path):
    """Return a function that starts engines, which are closed after the test."""
    started = []

    def make(model, **kwargs):
        engine = make_engine(model, tmp_path / f"log_{len(started)}", **kwargs)
        started.append(engine)
        return engine

    yield make
    for engine in reversed(started):
        engine.close()
