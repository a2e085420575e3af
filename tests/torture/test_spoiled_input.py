"""Spoiled configurations, models, rows and checkpoints are accepted or refused in one line, never with a traceback."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_brorl.checkpoints import folders
from megatron_brorl.checkpoints import training as checkpoint
from megatron_brorl.checkpoints.hugging_face import Checkpoint
from megatron_brorl.cli.run_folder import check_fingerprint, fingerprint
from megatron_brorl.config.load import load
from megatron_brorl.config.schema import Config
from megatron_brorl.data.prompts import read_rows
from megatron_brorl.errors import UserError
from megatron_brorl.families.shape import CONFIG, WEIGHTS, read_shape
from megatron_brorl.models.weights.names import hf_shapes
from megatron_brorl.ops.rope import inverse_frequencies
from megatron_brorl.train.state import read_state

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").rglob("*.toml"))
KEYS = ["rollout.n", "optim.lr", "algo.kl_in", "optim.betas", "data.train", "train.offload", "rollout.nn"]
VALUES = st.one_of(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    st.sampled_from([2**63, -(10**400), "../x", "\x00", "x" * 10_000, [], {}, [[]], {"a": [None]}, ["x"] * 1000]),
)
# (relative position, number of bytes to remove, bytes to insert)
SPOIL = st.tuples(
    st.floats(0, 1), st.sampled_from([0, 1, 8, 1000]), st.sampled_from([b"", b"\xff\x00", b"[" * 5000, b'"'])
)
QUICK = settings(
    max_examples=40,
    deadline=10_000,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def spoiled(data: bytes, spoil: tuple[float, int, bytes]) -> bytes:
    position, removed, inserted = spoil
    begin = int(position * len(data))
    return data[:begin] + inserted + data[begin + removed :]


def with_value(raw: Any, selector: int, value: Any) -> Any:
    """Return a copy of a JSON object with one value replaced, at any depth. selector: any number; selects the value."""
    keys = sorted(raw)
    key = keys[selector % len(keys)]
    inner = raw[key]
    deeper = isinstance(inner, dict) and inner and selector % 2
    return {**raw, key: with_value(inner, selector // len(keys), value) if deeper else value}


def accepted(function: Any, *arguments: Any) -> bool:
    """Return whether the function accepts the input; check that a refusal is one line below 2000 characters."""
    refusal = ""
    try:
        function(*arguments)
    except UserError as e:
        refusal = str(e)
    assert "\n" not in refusal
    assert len(refusal) < 2000
    return not refusal


@QUICK
@given(st.sampled_from(EXAMPLES), st.sampled_from(KEYS), VALUES, st.none() | SPOIL)
def test_spoiled_configurations(tmp_path, example, key, value, spoil):
    file = tmp_path / "run.toml"
    file.write_bytes(spoiled(example.read_bytes(), spoil) if spoil else example.read_bytes())
    accepted(load, file, [f"{key}={json.dumps(value, default=str)}"])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny.make_model(folder, "qwen2", tied=True)
    assert accepted(read_model, folder)
    return folder


def read_model(folder: Path) -> None:
    shape = read_shape(folder)
    inverse_frequencies(shape)
    weights = Checkpoint(folder)
    weights.check(hf_shapes(shape))
    for name in weights.files:
        weights.tensor(name)


@QUICK
@given(st.integers(0, 500), VALUES, st.none() | SPOIL, st.booleans())
def test_spoiled_models(model, tmp_path, selector, value, spoil, in_header):
    config = (model / CONFIG).read_bytes()
    weights = (model / WEIGHTS).read_bytes()
    header_size = int.from_bytes(weights[:8], "little")
    header = weights[8 : 8 + header_size]
    if in_header:  # of the weights; else in config.json
        header = json.dumps(with_value(json.loads(header), selector, value)).encode()
        content = struct.pack("<Q", len(header)) + header + weights[8 + header_size :]
        weights = content if spoil is None else spoiled(weights, spoil)
    else:
        text = json.dumps(with_value(json.loads(config), selector, value)).encode()
        config = text if spoil is None else spoiled(config, spoil)
    (tmp_path / CONFIG).write_bytes(config)
    (tmp_path / WEIGHTS).write_bytes(weights)
    accepted(read_model, tmp_path)


ROWS = [{"prompt": "1+1=", "answer": "2", "id": "a", "verifier": "exact", "metadata": {"x": [1, 2.5]}}] * 2


@QUICK
@given(st.integers(0, 50), VALUES, st.none() | SPOIL)
def test_spoiled_rows(tmp_path, selector, value, spoil):
    lines = [json.dumps(row).encode() + b"\n" for row in (ROWS[0], with_value(ROWS[1], selector, value))]
    file = tmp_path / "rows.jsonl"
    file.write_bytes(spoiled(b"".join(lines), spoil) if spoil else b"".join(lines))
    accepted(read_rows, file)


@QUICK
@given(st.integers(0, 500), VALUES, st.none() | SPOIL)
def test_spoiled_checkpoints(model, tmp_path, selector, value, spoil):
    """run.json is spoiled, and the manifest has the hash of the spoiled file."""
    current = fingerprint(Config(), read_shape(model), {})
    run = {
        "step": 3,
        "optimizers_that_have_stepped": [""],
        "updates": 6,
        "critic_updates": 0,
        "critic_steps": 0,
        "source_position": {"rounds": 3, "prompts_read": 12, "recent_prompts": 1.0, "recent_kept": 2.0},
        "trained_s": 3.5,
        "early_stopping": {"best": 0.5, "count": 1},
        "reference_stopping": {"best": None, "count": 0},
        "initial_evaluation": None,
        "elapsed_s": 4.0,
        "started_at": 0.0,
        "best": None,
        "fingerprint": current,
    }
    step = tmp_path / "checkpoints" / "step_00000003"
    step.mkdir(parents=True, exist_ok=True)
    (step.parent / checkpoint.LATEST).write_text("step_00000003\n")

    def resume() -> None:
        (step / folders.MANIFEST).unlink(missing_ok=True)
        folders.write_manifest(step)
        saved = checkpoint.find(step.parent)
        assert saved
        check_fingerprint(read_state(saved).fingerprint, current, saved)

    (step / checkpoint.RUN).write_text(json.dumps(run))
    assert accepted(resume)
    data = json.dumps(with_value(run, selector, value)).encode()
    (step / checkpoint.RUN).write_bytes(spoiled(data, spoil) if spoil else data)
    accepted(resume)
