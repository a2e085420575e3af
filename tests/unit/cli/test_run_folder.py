"""Tests of the changes that a resumed run may make."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from megatron_brorl.cli.run_folder import change_line, check_fingerprint, fingerprint
from megatron_brorl.config.load import load_table
from megatron_brorl.config.rules import fixed_keys
from megatron_brorl.config.schema import Config
from megatron_brorl.errors import UserError
from megatron_brorl.families.shape import ModelShape

WHERE = Path("runs/x/checkpoints/step_00000003")
SHAPE = ModelShape(**{f.name: 1 for f in dataclasses.fields(ModelShape)})
INPUTS = {"tokenizer": "a" * 64, "train": "b" * 64, "held_out": "c" * 64}

# Sections whose keys may all change, because they affect neither the data nor the content of checkpoints.
FREE_SECTIONS = "parallel fp8 engine shaping critic reference teacher ops theory sft"
FIXED = {
    "run": "seed",
    "model": "dtype",
    "lora": "rank alpha targets",
    "rollout": "max_tokens stop_strings partial_tokens refills",
    "algo": "gamma",
    "optim": "betas",
    "train": "freeze_router",
    "evaluate": "temperature top_p",
}
FREE = {
    "data": "train held_out",
    "environment": "max_tool_seconds",
    "agent": "max_seconds",
    "reward": "workers timeout_s unsandboxed",
}


def fingerprint_of(table):
    return fingerprint(load_table(table, "the table"), SHAPE, {}, INPUTS)


def changes(before, after):
    """Return the changes between two configurations, with the first one stored as JSON as in a checkpoint."""
    return check_fingerprint(json.loads(json.dumps(fingerprint_of(before))), fingerprint_of(after), WHERE)


def test_every_key_is_fixed_or_may_change():
    """The expected list is repeated here, so that each new key must be classified."""
    expected = set()
    for section in (f.name for f in dataclasses.fields(Config)):
        names = {f.name for f in dataclasses.fields(getattr(Config(), section))}
        if section in FREE:
            names -= set(FREE[section].split())
        elif section in FIXED:
            names = set(FIXED[section].split())
        else:
            assert section in FREE_SECTIONS.split(), section
            names = set()
        expected |= {f"{section}.{name}" for name in names}
    assert fixed_keys() == expected


def tables(overrides):
    """Return tables of section.key=value pairs, with values in JSON."""
    table = {}
    for path, value in (item.split("=") for item in overrides.split()):
        section, key = path.split(".")
        table.setdefault(section, {})[key] = json.loads(value)
    return table


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("", "optim.lr=2e-6", {"optim.lr": (1e-6, 2e-6)}),
        (
            'optim.lr_schedule="cosine" train.steps=100',
            'optim.lr_schedule="cosine" optim.min_lr_ratio=0.1 train.steps=200',
            {"optim.min_lr_ratio": (0.0, 0.1), "train.steps": (100, 200)},
        ),
        ("", 'algo.advantage="grpo"', {"algo.advantage": ("reinforce_pp_baseline", "grpo")}),
        ("algo.kl_coef=0.1", "algo.kl_coef=0.01", {"algo.kl_coef": (0.1, 0.01)}),
        ("", "rollout.n=64", {"rollout.n": (512, 64)}),
        ('data.train=["a.jsonl"]', 'data.train=["b.jsonl"]', {"data.train": (["a.jsonl"], ["b.jsonl"])}),
        ("", "", {}),
    ],
)
def test_allowed_changes_are_listed(before, after, expected):
    listed = changes(tables(before), tables(after))
    assert listed == expected
    line = change_line(listed)
    assert line.count(" -> ") == len(expected)
    assert all(f"{path} = {json.dumps(old)} -> {json.dumps(new)}" in line for path, (old, new) in expected.items())


@pytest.mark.parametrize(
    ("before", "after", "key"),
    [
        ("", "run.seed=1", "run.seed = 0, now 1"),
        ("", 'model.dtype="bf16"', 'model.dtype = "fp32", now "bf16"'),
        ("", "rollout.max_tokens=2048", "rollout.max_tokens = 1024, now 2048"),
        ("", "rollout.partial_tokens=512", "rollout.partial_tokens = 0, now 512"),
        ("rollout.partial_tokens=512", "rollout.partial_tokens=512 rollout.n=64", "rollout.n = 512, now 64"),
        ("rollout.refills=1", "rollout.refills=1 rollout.temperature=0.5", "rollout.temperature = 1.0, now 0.5"),
        ("", 'algo.advantage="gae"', 'algo.advantage = "reinforce_pp_baseline", now "gae"'),
        ('algo.advantage="gae"', 'algo.advantage="gae" algo.gamma=0.9', "algo.gamma = 1.0, now 0.9"),
        ("", "algo.kl_coef=0.1", "algo.kl_coef = 0.0, now 0.1"),
        ("", "optim.betas=[0.9,0.95]", "optim.betas = [0.9, 0.999], now [0.9, 0.95]"),
    ],
)
def test_changes_of_fixed_keys_are_refused(before, after, key):
    with pytest.raises(UserError) as caught:
        changes(tables(before), tables(f"{after} optim.lr=1e-5"))
    assert str(caught.value).startswith(f"{WHERE}: was written with {key}")


@pytest.mark.parametrize("key", ["model", "teacher"])
def test_another_model_or_teacher_is_refused(key):
    shapes = [{"model": SHAPE, "teacher": SHAPE, key: dataclasses.replace(SHAPE, heads=n)} for n in (1, 8)]
    before, now = (fingerprint(Config(), s["model"], {}, INPUTS, s["teacher"]) for s in shapes)
    assert check_fingerprint(before, before, WHERE) == {}
    with pytest.raises(UserError, match=rf"was written with another model in {key}\.path \(heads = 1, now 8\)"):
        check_fingerprint(before, now, WHERE)


def test_an_algorithm_may_become_a_function_of_the_user():
    before = fingerprint(Config(), SHAPE, {}, INPUTS)
    now = fingerprint(load_table({"algo": {"advantage": "mine.py:f"}}, ""), SHAPE, {"mine.py:f": "a" * 64}, INPUTS)
    assert check_fingerprint(before, now, WHERE) == {"algo.advantage": ("reinforce_pp_baseline", "mine.py:f")}
    assert check_fingerprint(now, before, WHERE) == {"algo.advantage": ("mine.py:f", "reinforce_pp_baseline")}


def test_a_changed_file_of_a_function_is_refused_unless_it_is_accepted():
    before, now = (fingerprint(Config(), SHAPE, {"mine.py:score": digit * 64}, INPUTS) for digit in "ab")
    assert check_fingerprint(before, before, WHERE) == {}
    assert check_fingerprint(before, now, WHERE, True) == {"own_functions.mine.py:score": ("a" * 64, "b" * 64)}
    version = r"another version of mine\.py:score \(sha256 aaaaaaaaaaaa, now bbbbbbbbbbbb\)"
    with pytest.raises(UserError, match=f"^{WHERE}: .* {version}: --accept-changed-functions .* another run.dir"):
        check_fingerprint(before, now, WHERE)


@pytest.mark.parametrize(
    ("key", "name"), [("tokenizer", r"tokenizer files in model\.path"), ("train", r"rows of data\.train")]
)
def test_changed_data_or_tokenizer_is_refused(key, name):
    before = fingerprint(Config(), SHAPE, {}, {**INPUTS, key: "d" * 64})
    with pytest.raises(UserError, match=name + r" \(sha256 dddddddddddd, now "):
        check_fingerprint(before, fingerprint_of({}), WHERE)


def test_a_checkpoint_without_a_key_is_refused():
    before = fingerprint_of({})
    del before["optim"]["lr_schedule"]
    with pytest.raises(UserError, match=r'optim\.lr_schedule = null, now "constant"'):
        check_fingerprint(before, fingerprint_of({}), WHERE)
