"""Tests that programs succeed and fail in a sandbox as they do when CPython runs them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from endings import CALLED, EXITS, LOADED

from megatron_brorl.rewards.sandbox import probe
from megatron_brorl.rewards.sandbox.isolation import Limits
from megatron_brorl.rewards.sandbox.run import Sandbox
from megatron_brorl.rewards.verifiers import code

pytestmark = pytest.mark.skipif(probe.problem() is not None, reason=str(probe.problem()))
FORMS = {
    "function": {"tests": [{"args": [i, i + 4711], "expected": 2 * i + 4711} for i in range(3)]},
    "asserts": {"asserts": [f"assert add({i}, {i + 4711}) == {2 * i + 4711}" for i in range(3)]},
}
SANDBOX = Sandbox(True, Limits(seconds=60.0, test_seconds=20.0))


def some(names: Iterable[str]) -> list[Any]:
    """Return all names, four of five of them marked as slow."""
    return [pytest.param(name, marks=pytest.mark.slow if i % 5 else ()) for i, name in enumerate(names)]


@pytest.mark.parametrize("name", some(EXITS))
def test_a_script_ends_as_it_does_under_cpython(name: str, tmp_path: Path) -> None:
    """Success is the same, and so is the output of successful programs."""
    path = tmp_path / "solution.py"
    path.write_text(EXITS[name])
    real = subprocess.run([sys.executable, "-I", str(path)], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    outcome = SANDBOX.run(EXITS[name], "")
    assert (outcome.status == "ok") == (real.returncode == 0), outcome
    if real.returncode == 0:
        assert outcome.stdout == real.stdout


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", some([*(f"loaded {n}" for n in LOADED), *(f"called {n}" for n in CALLED)]))
def test_a_test_passes_only_if_the_function_returns(name: str, form: str) -> None:
    when, _, which = name.partition(" ")
    program, share = {"loaded": LOADED, "called": CALLED}[when][which]
    metadata = {"function": "add", **FORMS[form]}
    assert (
        code.verify(program, {"id": "1", "prompt": "", "answer": None, "metadata": metadata}, SANDBOX).reward == share
    )
