"""What `brorl config` says of a key is what stands beside it in the schema, and JSON Schema agrees with the loader."""

from __future__ import annotations

import dataclasses
import sys
import typing
from pathlib import Path

import pytest

from megatron_brorl.config.describe import json_schema, keys, sections, written
from megatron_brorl.config.load import load
from megatron_brorl.config.schema import Config
from megatron_brorl.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).parents[3]


def paths(kind, prefix=""):
    """Every key of a dataclass and of those in it."""
    for f in dataclasses.fields(kind):
        hint = typing.get_type_hints(kind)[f.name]
        inner = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint
        if prefix:
            yield f"{prefix}{f.name}"
        if dataclasses.is_dataclass(inner):
            yield from paths(inner, f"{prefix}{f.name}{'' if inner is hint else '[]'}.")


def test_every_key_is_there_and_has_a_meaning():
    assert [key.path for key in keys()] == list(paths(Config))
    assert [key.path for key in keys() if not key.meaning] == []


def test_the_comment_above_goes_before_the_one_beside():
    found = {key.path: key for key in keys()}
    assert found["rollout.n"].meaning == "rollouts per prompt"
    assert found["train.patience"].meaning.startswith("Evaluations in a row whose held-out pass@1 is not above")
    assert found["train.patience"].meaning.endswith("the run ends then. 0 = never")
    assert (found["rollout.n"].type, written(found["rollout.n"].default)) == ("integer", "512")
    assert found["optim.betas"].type == "list of 2 numbers"
    assert found["rollout.engine"].type == '"torch" | "trtllm" | "vllm"'
    assert found["data.tasks[].name"].required
    assert sections()["shaping"].startswith("What is added to rewards before advantages")
    assert sections()["train"] == ""


@pytest.mark.parametrize("value", [True, 3, 1e-6, 'a "b" \\d\nc', ["x", "y"], {"prompt": "question"}, (0.9, 0.999)])
def test_values_are_written_as_toml_reads_them(value):
    read = tomllib.loads(f"v = {written(value)}")["v"]
    assert read == (list(value) if isinstance(value, tuple) else value)


def test_json_schema_and_loader_agree(tmp_path):
    jsonschema = pytest.importorskip("jsonschema")
    schema = json_schema()
    jsonschema.Draft7Validator.check_schema(schema)
    validator = jsonschema.Draft7Validator(schema)

    for path in sorted(REPOSITORY.glob("examples/**/*.toml")):
        assert not list(validator.iter_errors(tomllib.loads(path.read_text(encoding="utf-8")))), path
    for text in (
        "[rollout]\nn = 'four'",
        "[rollout]\nn = 0",
        "[rollout]\nnn = 4",
        "[rollout]\ntop_p = 0",
        "[rollout]\ntop_p = 1.1",
        "[optim]\nbetas = [0.9]",
        "[optim]\nbetas = [0.9, 1.0]",
        "[algo]\neps_low = 1",
        "[rollout]\nengine = 'tgi'",
        "[run]\nlog = ['tensorbord']",
        "[[data.tasks]]\nweight = 2",
        "[data]\ntrain = 'a.jsonl'",
    ):
        path = tmp_path / "run.toml"
        path.write_text(text)
        with pytest.raises(UserError):
            load(path)
        assert list(validator.iter_errors(tomllib.loads(text))), text
