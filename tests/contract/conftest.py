"""Fixtures that start engines on the fake tensorrt_llm."""

import forks
import pytest
from contract.engines import DOUBLE, Model, make_engine

from megatron_brorl.rollout.remote import process


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return Model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def double(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(DOUBLE))


@pytest.fixture(autouse=True)
def forked(request, monkeypatch):
    """Fork engine processes, which is faster, unless a test uses the fixture `fresh`."""
    if "fresh" not in request.fixturenames:
        monkeypatch.setattr(process, "subprocess", forks.engines())


@pytest.fixture
def fresh():
    """Start engine processes with their own interpreter."""


@pytest.fixture
def start(model, tmp_path):
    """Return a function that starts engines, which are closed after the test."""
    started = []

    def make(**kwargs):
        engine = make_engine(model, tmp_path / f"log_{len(started)}", **kwargs)
        started.append(engine)
        return engine

    yield make
    for engine in reversed(started):
        engine.close()
