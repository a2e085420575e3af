"""Engines on the contract double."""

from __future__ import annotations

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
    """Engines are forks, but where a test says that it is about how a process starts (`fresh`)."""
    if "fresh" not in request.fixturenames:
        monkeypatch.setattr(process, "subprocess", forks.engines())


@pytest.fixture
def fresh():
    """Engines are processes of their own."""


@pytest.fixture
def start(model, tmp_path):
    """Starts engines, and ends them after the test."""
    started = []

    def make(**kwargs):
        engine = make_engine(model, tmp_path / f"log_{len(started)}", **kwargs)
        started.append(engine)
        return engine

    yield make
    for engine in reversed(started):
        engine.close()
